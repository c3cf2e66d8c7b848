"""The KV cache: pages of keys and values, and a summary of every page if selectors need one."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8, Shaped

from et_jax.decode.attention.summaries import PageSummary, summarised, summarised_by_kernel
from et_jax.decode.cache.eight_bits import dequantized, quantized
from et_jax.decode.once import run_if
from et_jax.pallas.backend import platform
from et_jax.pallas.checks import EIGHT_BITS, SUBLANES, code_rows, padded_width
from et_jax.pallas.per_head import fits
from et_jax.types import pytree, replace, static


@pytree
class LayerCache:
    """Pages of one layer, or of `depth` stacked layers: key and value of a token side by side, then padding.

    Every array has one axis of pages, the second. A page-table entry is the page's number in the first layer; each
    further layer adds `num_pages`, so code that reads and writes pages is independent of layers.

    In 8 bits a token's key and its value are multiplied by one scale each, stored in
    `kv_scales`: the greatest magnitude of the key, or the value, over the greatest 8-bit number, and not finite if
    the former is not. The stored form of a token depends only on that token.

    `summary` is None if every layer uses full attention. `key_codes` are 8-bit copies of the keys
    for certified selection, a page's tokens in the rows of `checks.code_rows`; None unless requested. A key is
    code * scale + offset, channel by channel, with scale = (max - min) / 255 and offset = min + 128 scale
    of the page's box, rounded to the nearest.
    """

    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"]
    summary: PageSummary | None
    key_codes: Int8[Array, "k p r w"] | None
    kv_scales: Float[Array, "k p 2 s"] | None = None
    depth: int = static(default=1)

    @property
    def num_pages(self) -> int:
        """The pages of each layer."""
        return self.pages.shape[1] // self.depth

    def numbers(self, pages: Int[Array, "..."], turn: int | Int[Array, "..."] | None) -> Int[Array, "..."]:
        """Return the indices in these arrays of page-table entries, for the layer at a turn.

        Numbers past the last page stay past the end. The turn of an unstacked layer is None.
        """
        if turn is None:
            return pages
        return jnp.where(pages < self.num_pages, pages + turn * self.num_pages, self.pages.shape[1])

    def of_all(self, pages: Int[Array, " m"]) -> Int[Array, " lm"]:
        """Return the indices in these arrays of page-table entries, for one layer after the other."""
        if self.depth == 1:
            return pages
        return self.numbers(pages, jnp.arange(self.depth, dtype=pages.dtype)[:, None]).reshape(-1)

    @property
    def summaries(self) -> PageSummary:
        """The summary of every page. Raises ValueError for a cache without summaries."""
        if self.summary is None:
            raise ValueError("cache: got one without summaries, which block selection requires")
        return self.summary

    def tokens(self, page: Int[Array, "*p"], head_dim: int) -> Float[Array, "k *p s e"]:
        """Return the tokens of these pages, dequantized."""
        return dequantized(self.pages[:, page], None if self.kv_scales is None else self.kv_scales[:, page], head_dim)


@pytree
class KVCache:
    """The pages of every layer in order; if layers are stacked, of those at every place (`models.stacks.Stack`).

    `surprisal` has -log p of every cached token given those before it, in nats, page by page; None
    unless requested.
    """

    layers: tuple[LayerCache, ...]
    surprisal: Float[Array, "p s"] | None


def token_width(head_dim: int) -> int:
    """Return `e`: key and value of one head, padded to full lanes, so that a page is one transfer on every chip."""
    return padded_width(head_dim)


def token_bytes(head_dim: int, dtype: DTypeLike) -> int:
    """Return the bytes of one token of a KV head in a cache of this dtype, scales included."""
    return token_width(head_dim) * jnp.dtype(dtype).itemsize + (2 * 4 if jnp.dtype(dtype) in EIGHT_BITS else 0)


def empty(
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    dtype: DTypeLike,
    *,
    summaries: bool = True,
    key_codes: bool = False,
    surprisals: bool = False,
    depths: tuple[int, ...] | None = None,
    chips: int = 1,
) -> KVCache:
    """Return a cache of zeros, with 8-bit copies of the keys and the tokens' surprisals if requested.

    A `dtype` of 8 bits has scales. Boxes are then in float32, and also if each of the `chips` has one head: in bfloat16
    a TPU stores two pages of one head a word, and kernels read single pages. The copies require `summaries`, whose
    boxes define them. `depths` is the number of layers at each place, None for one each.

    A multiple of 8 pages gets one more, which no table uses. A TPU stores the summaries of such a pool in tiles of 8
    pages of one head; the kernels that score blocks read all heads of a page at once, the layout of every other number
    of pages, and would require a copy of all summaries before each call.
    """
    if key_codes and not summaries:
        raise ValueError("key_codes: got True without summaries, whose boxes the codes require")
    num_pages += num_pages % SUBLANES == 0
    e, scaled = token_width(head_dim), jnp.dtype(dtype) in EIGHT_BITS

    def summary(num_pages: int) -> PageSummary:
        return PageSummary(
            key_box=jnp.zeros((num_kv_heads, num_pages, e), jnp.float32 if scaled or num_kv_heads == chips else dtype),
            mean=jnp.zeros((num_kv_heads, num_pages, e), jnp.float32),
            value_radius=jnp.zeros((num_kv_heads, num_pages), jnp.float32),
        )

    def place(depth: int) -> LayerCache:
        p = depth * num_pages
        p += p % SUBLANES == 0
        return LayerCache(
            pages=jnp.zeros((num_kv_heads, p, page_size, e), dtype),
            summary=summary(p) if summaries else None,
            key_codes=jnp.zeros((num_kv_heads, p, *code_rows(page_size, head_dim)), jnp.int8) if key_codes else None,
            kv_scales=jnp.zeros((num_kv_heads, p, 2, page_size), jnp.float32) if scaled else None,
            depth=depth,
        )

    return KVCache(
        layers=tuple(map(place, (1,) * num_layers if depths is None else depths)),
        surprisal=jnp.zeros((num_pages, page_size), jnp.float32) if surprisals else None,
    )


def write(
    layer: LayerCache,
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    end: Int[Array, " b"] | None = None,
    full_page: Int[Array, " b"] | None = None,
    turn: Int[Array, ""] | None = None,
) -> LayerCache:
    """Store the first `count` of `t` new tokens from position `start` on, and summarise the pages they fill.

    The pages must be allocated. `end` is the number of tokens after all rows are stored, if several rows belong
    to one sequence; otherwise it is `start + count`. Tokens beyond `count` are dropped. `full_page` is the page that
    each row of one token fills, in the numbers of the layer at a `turn`. A summary is computed from the page's stored
    tokens, so it is exact whatever was there before; a partial page has none, because the block that a
    sequence ends in is always read.
    """
    e, t, d = layer.pages.shape[3], k.shape[1], k.shape[3]
    scales = None
    if layer.kv_scales is not None:
        (k, of_key), (v, of_value) = (quantized(x, layer.pages.dtype) for x in (k, v))
        scales = jnp.stack([of_key, of_value]).transpose(3, 1, 0, 2)
    new = jnp.concatenate([k, v], axis=-1).astype(layer.pages.dtype)
    new = jnp.pad(new, ((0, 0), (0, 0), (0, 0), (0, e - 2 * d))).transpose(2, 0, 1, 3)
    if scales is not None and platform() == "tpu":
        layer = by_pages(layer, new, scales, table, start, count)
    else:
        layer = _by_tokens(layer, new, scales, table, start, count)
    return with_summaries(layer, d, table, start, count, start + count if end is None else end, t, full_page, turn)


def with_summaries(
    layer: LayerCache,
    head_dim: int,
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    end: Int[Array, " b"],
    t: int = 1,
    full_page: Int[Array, " b"] | None = None,
    turn: Int[Array, ""] | None = None,
) -> LayerCache:
    """Return a layer with summaries of the pages that `t` new tokens fill. The rest is as in `write`.

    The tokens must be stored already.
    """
    if layer.summary is None:
        return layer
    page_size, e = layer.pages.shape[2:]
    d, num_pages = head_dim, layer.pages.shape[1]
    block = (start // page_size)[:, None] + jnp.arange((t + page_size - 2) // page_size + 1)
    full = (count[:, None] > 0) & (end[:, None] >= (block + 1) * page_size)
    # On a GPU the kernel runs at every token, because a condition would synchronise with the host.
    if platform() == "gpu" and fits(page_size, d) and fits(page_size, e):
        page, layers = _page_of(table, block, full, 0), {}
        if full_page is not None and turn is not None:
            page, layers = full_page[:, None], {"turn": turn.reshape(1), "depth": layer.depth}
        found = summarised_by_kernel(layer.summary, layer.key_codes, layer.pages, layer.kv_scales, page, d, **layers)
        return replace(layer, summary=found[0], key_codes=found[1])
    filled = _page_of(table, block, full, num_pages)
    return run_if(jnp.any(full), partial(_summarised, head_dim=d), layer, filled)


def _summarised(layer: LayerCache, page: Int[Array, "b m"], head_dim: int) -> LayerCache:
    summary, codes = summarised(layer.summaries, layer.key_codes, layer.tokens(page, head_dim), page, head_dim)
    return replace(layer, summary=summary, key_codes=codes)


def _by_tokens(
    layer: LayerCache,
    new: Shaped[Array, "k b t e"],
    scales: Float[Array, "k b 2 t"] | None,
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> LayerCache:
    """Return the layer with new tokens stored, one by one."""
    num_pages, page_size, _ = layer.pages.shape[1:]
    t = new.shape[2]
    position = start[:, None] + jnp.arange(t)
    page = _page_of(table, position // page_size, jnp.arange(t) < count[:, None], num_pages)
    # every axis but the last is indexed: a slice over heads makes XLA copy the pool to another layout in a TPU loop
    head, token = jnp.arange(len(new))[:, None, None], position % page_size
    layer = replace(layer, pages=layer.pages.at[head, page, token].set(new, mode="drop"))
    if layer.kv_scales is None or scales is None:
        return layer
    place = head[..., None], page[:, None], jnp.arange(2)[:, None], token[:, None]
    return replace(layer, kv_scales=layer.kv_scales.at[place].set(scales, mode="drop"))


def by_pages(
    layer: LayerCache,
    new: Shaped[Array, "k b t e"],
    scales: Float[Array, "k b 2 t"],
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> LayerCache:
    """Return the layer in 8 bits with new tokens stored, page after page of row after row.

    On a TPU four tokens share a word: storing a single one makes XLA copy the entire pool to another layout.
    """
    heads, _, page_size, e = layer.pages.shape
    t = new.shape[2]
    blocks = (t + page_size - 2) // page_size + 1  # the most blocks that a row's tokens span
    block = (start // page_size)[:, None] + jnp.arange(blocks)
    page = _page_of(table, block, block * page_size < jnp.where(count > 0, start + count, 0)[:, None], 0)
    around = [(page_size, page_size)]
    new = jnp.pad(new, [(0, 0), (0, 0), *around, (0, 0)])
    scales = jnp.pad(scales, [(0, 0), (0, 0), (0, 0), *around])

    def store(i: Int[Array, ""], stored: tuple[Array, Array]) -> tuple[Array, Array]:
        row, place = i // blocks, i % blocks
        first = block[row, place] * page_size - start[row]  # the index of the new token at the page's beginning
        token = first + jnp.arange(page_size)
        mine = (token >= 0) & (token < count[row])

        def put(pool: Array, given: Array, given_at: tuple, size: tuple[int, int], kept: Array) -> Array:
            at = (0, page[row, place], 0, 0)
            old = jax.lax.dynamic_slice(pool, at, (heads, 1, *size))
            there = jax.lax.dynamic_slice(given, (0, row, *given_at), (heads, 1, *size))
            # computed separately: as a part of the update it takes a fifth more cycles, by the v5e's compiler
            page_then = jax.lax.optimization_barrier(jnp.where(kept, there, old))
            return jax.lax.dynamic_update_slice(pool, page_then, at)

        pages, kv_scales = stored
        return (
            put(pages, new, (first + page_size, 0), (page_size, e), mine[:, None]),
            put(kv_scales, scales, (0, first + page_size), (2, page_size), mine),
        )

    pages, kv_scales = jax.lax.fori_loop(0, blocks * len(table), store, (layer.pages, layer.kv_scales))
    return replace(layer, pages=pages, kv_scales=kv_scales)


def write_surprisal(
    cache: KVCache,
    surprisal: Float[Array, "b t"],
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> KVCache:
    """Store the surprisals, in nats, of the first `count` of `t` new tokens from position `start` on."""
    if cache.surprisal is None:
        raise ValueError("surprisal: this cache stores none")
    num_pages, page_size = cache.surprisal.shape
    t = surprisal.shape[1]
    position = start[:, None] + jnp.arange(t)
    page = _page_of(table, position // page_size, jnp.arange(t) < count[:, None], num_pages)
    return replace(cache, surprisal=cache.surprisal.at[page, position % page_size].set(surprisal, mode="drop"))


def _page_of(table: Int[Array, "b n"], block: Int[Array, "b t"], keep: Array, num_pages: int) -> Int[Array, "b t"]:
    """Return each block's page, and one past the last page (which a write drops) if `keep` is False."""
    last = table.shape[1] - 1
    return jnp.where(keep, jnp.take_along_axis(table, jnp.minimum(block, last), axis=1), num_pages)


def with_place(cache: KVCache, place: int, cached: LayerCache) -> KVCache:
    """Return the cache with new pages at a place."""
    return replace(cache, layers=(*cache.layers[:place], cached, *cache.layers[place + 1 :]))


def put_layer(place: LayerCache, pages: Int[Array, " m"], taken: LayerCache) -> LayerCache:
    """Return the arrays of a place with the pages of `taken`, of one layer, written at these indices.

    Every axis but the last is indexed: a slice over heads makes XLA copy the pool to another layout in a TPU loop.
    """

    def over(x: Array, y: Array) -> Array:
        index = [jnp.arange(size) for size in x.shape[: max(x.ndim - 1, 2)]]
        index[1] = pages
        return x.at[jnp.ix_(*index)].set(y, mode="drop")

    return jax.tree.map(over, place, replace(taken, depth=place.depth))


def take_pages(cache: KVCache, pages: Int[Array, " m"]) -> KVCache:
    """Return a cache of only the listed pages, including summaries and codes."""

    def taken(place: LayerCache) -> LayerCache:
        at = place.of_all(pages)
        return jax.tree.map(lambda x: x[:, at], place)

    layers = tuple(map(taken, cache.layers))
    return KVCache(layers=layers, surprisal=None if cache.surprisal is None else cache.surprisal[pages])


def put_pages(cache: KVCache, pages: Int[Array, " m"], taken: KVCache) -> KVCache:
    """Return the cache with the pages of `taken` written to the listed ones; those beyond the pool are dropped."""

    def put_all(place: LayerCache, one: LayerCache) -> LayerCache:
        at = place.of_all(pages)
        return jax.tree.map(lambda x, y: x.at[:, at].set(y, mode="drop"), place, one)

    layers = tuple(map(put_all, cache.layers, taken.layers))
    surprisal = cache.surprisal
    if surprisal is not None:
        surprisal = surprisal.at[pages].set(taken.surprisal, mode="drop")
    return KVCache(layers=layers, surprisal=surprisal)

"""The KV cache: pages of keys and values, and a summary of every page where blocks are chosen by it."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax.decode.once import run_if
from et_jax.pallas.checks import SUBLANES, padded_width
from et_jax.sums import total
from et_jax.types import pytree, replace, static


@pytree
class PageSummary:
    """What is known of each page without reading it, once all its tokens are written.

    `key_box` holds the channelwise minimum of the keys in its first half and the maximum in its second;
    `mean` the mean key, then the mean value; `value_radius` the greatest distance of a value from the
    mean value. Laid out as a cached token is, key part first.
    """

    key_box: Float[Array, "k *p e"]
    mean: Float[Array, "k *p e"]
    value_radius: Float[Array, "k *p"]


@pytree
class LayerCache:
    """Pages of a layer, or of `depth` layers in turn: key and value of a token side by side, then padding.

    Every array has one axis of pages, the second. A page of the page table is that number of the first layer, and so
    many further on of the next (`num_pages`), so that what reads and writes pages knows no layers.

    `summary` is None where every block is read whatever it holds. `key_codes` are 8-bit copies of the keys
    for certified selection, a page's tokens side by side; None unless asked for. A key is
    code * scale + offset, channel by channel, with scale = (max - min) / 255 and offset = min + 128 scale
    of the page's box, rounded to the nearest.
    """

    pages: Float[Array, "k p s e"]
    summary: PageSummary | None
    key_codes: Int8[Array, "k p sd"] | None
    depth: int = static(default=1)

    @property
    def num_pages(self) -> int:
        """The pages of each layer."""
        return self.pages.shape[1] // self.depth

    def numbers(self, pages: Int[Array, "..."], turn: int | Int[Array, "..."] | None) -> Int[Array, "..."]:
        """Return which pages of these arrays the numbers of a page table are, of the layer at a turn.

        Numbers past the last page stay past the end. None is the turn of a layer that has the arrays for itself.
        """
        if turn is None:
            return pages
        return jnp.where(pages < self.num_pages, pages + turn * self.num_pages, self.pages.shape[1])

    def of_all(self, pages: Int[Array, " m"]) -> Int[Array, " lm"]:
        """Return which pages of these arrays the numbers of a page table are, of one layer after the other."""
        if self.depth == 1:
            return pages
        return self.numbers(pages, jnp.arange(self.depth, dtype=pages.dtype)[:, None]).reshape(-1)

    @property
    def summaries(self) -> PageSummary:
        """The summary of every page. Raises ValueError for a cache that keeps none."""
        if self.summary is None:
            raise ValueError("cache: got one that keeps no summaries, by which blocks are chosen")
        return self.summary


@pytree
class KVCache:
    """The pages of every layer in order; where layers are stacked, of those at every place (`models.stacks.Stack`).

    `surprisal` holds -log p of every cached token given those before it, in nats, page by page; None
    unless asked for.
    """

    layers: tuple[LayerCache, ...]
    surprisal: Float[Array, "p s"] | None


def token_width(head_dim: int) -> int:
    """Return `e`: key and value of one head, padded to whole lanes, so that a page is one transfer on every chip."""
    return padded_width(head_dim)


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
) -> KVCache:
    """Return a cache of zeros, with 8-bit copies of the keys and the tokens' surprisals where asked for.

    The copies need `summaries`, whose boxes they lie in. `depths` says how many layers lie at each place, None that
    each has one of its own.

    A multiple of 8 pages gets one more, which no table holds. A TPU lays the summaries of such a pool out in tiles of 8
    pages of one head; the kernels that score blocks read all heads of a page at once, as every other number of pages is
    laid out, and had it copy the summaries whole before each call.
    """
    if key_codes and not summaries:
        raise ValueError("key_codes: got True without summaries, in whose boxes the codes lie")
    num_pages += num_pages % SUBLANES == 0
    e = token_width(head_dim)

    def summary(num_pages: int) -> PageSummary:
        return PageSummary(
            key_box=jnp.zeros((num_kv_heads, num_pages, e), dtype),
            mean=jnp.zeros((num_kv_heads, num_pages, e), jnp.float32),
            value_radius=jnp.zeros((num_kv_heads, num_pages), jnp.float32),
        )

    def place(depth: int) -> LayerCache:
        p = depth * num_pages
        p += p % SUBLANES == 0
        return LayerCache(
            pages=jnp.zeros((num_kv_heads, p, page_size, e), dtype),
            summary=summary(p) if summaries else None,
            key_codes=jnp.zeros((num_kv_heads, p, page_size * head_dim), jnp.int8) if key_codes else None,
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
) -> LayerCache:
    """Store the first `count` of `t` new tokens from position `start` on, and summarise the pages they fill.

    The pages must be reserved. `end` is how many tokens there are after all rows are stored, where
    several rows belong to one sequence; otherwise it is `start + count`. Tokens beyond `count` are
    dropped. A summary is worked out from the page's stored tokens, so that it is exact whatever was there before; a
    page that is not full has none, for the block that a sequence ends in is read whatever it holds.
    """
    num_pages, page_size, e = layer.pages.shape[1:]
    t, d = k.shape[1], k.shape[3]
    new = jnp.concatenate([k, v], axis=-1).astype(layer.pages.dtype)
    new = jnp.pad(new, ((0, 0), (0, 0), (0, 0), (0, e - 2 * d))).transpose(2, 0, 1, 3)
    position = start[:, None] + jnp.arange(t)
    page = _page_of(table, position // page_size, jnp.arange(t) < count[:, None], num_pages)
    # every axis but the last is indexed: a window over heads makes XLA lay the pool out anew in a loop on TPU
    head = jnp.arange(layer.pages.shape[0])[:, None, None]
    pages = layer.pages.at[head, page, position % page_size].set(new, mode="drop")
    if layer.summary is None:
        return replace(layer, pages=pages)

    end = start + count if end is None else end
    block = (start // page_size)[:, None] + jnp.arange((t + page_size - 2) // page_size + 1)
    full = (count[:, None] > 0) & (end[:, None] >= (block + 1) * page_size)
    filled = _page_of(table, block, full, num_pages)
    return run_if(jnp.any(full), partial(_summarised, head_dim=d), replace(layer, pages=pages), filled)


def _summarised(layer: LayerCache, page: Int[Array, "b m"], head_dim: int) -> LayerCache:
    """The layer with summaries and codes of these pages, all of whose tokens count; of those beyond the pool none."""
    old, d = layer.summaries, head_dim
    tokens = layer.pages[:, page]
    fresh = summarise(tokens, jnp.full(page.shape, layer.pages.shape[2], jnp.int32), d)
    codes = layer.key_codes
    if codes is not None:
        codes = codes.at[:, page].set(encode(tokens[..., :d], fresh.key_box), mode="drop")
    summary = PageSummary(
        key_box=old.key_box.at[:, page].set(fresh.key_box, mode="drop"),
        mean=old.mean.at[:, page].set(fresh.mean, mode="drop"),
        value_radius=old.value_radius.at[:, page].set(fresh.value_radius, mode="drop"),
    )
    return replace(layer, summary=summary, key_codes=codes)


def write_surprisal(
    cache: KVCache,
    surprisal: Float[Array, "b t"],
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
) -> KVCache:
    """Store the surprisals, in nats, of the first `count` of `t` new tokens from position `start` on."""
    if cache.surprisal is None:
        raise ValueError("surprisal: this cache keeps none")
    num_pages, page_size = cache.surprisal.shape
    t = surprisal.shape[1]
    position = start[:, None] + jnp.arange(t)
    page = _page_of(table, position // page_size, jnp.arange(t) < count[:, None], num_pages)
    return replace(cache, surprisal=cache.surprisal.at[page, position % page_size].set(surprisal, mode="drop"))


def _page_of(table: Int[Array, "b n"], block: Int[Array, "b t"], keep: Array, num_pages: int) -> Int[Array, "b t"]:
    """Return each block's page, and one past the last page (which a write drops) where `keep` is False."""
    last = table.shape[1] - 1
    return jnp.where(keep, jnp.take_along_axis(table, jnp.minimum(block, last), axis=1), num_pages)


def summarise(pages: Float[Array, "k *p s e"], num_tokens: Int[Array, "*p"], head_dim: int) -> PageSummary:
    """Return the summary of `pages`, of which the first `num_tokens` tokens count."""
    d, e = head_dim, pages.shape[-1]
    keep = (jnp.arange(pages.shape[-2]) < num_tokens[..., None])[None, ..., None]
    key, value = pages[..., :d], pages[..., d : 2 * d]
    box = jnp.concatenate(
        [jnp.min(jnp.where(keep, key, jnp.inf), axis=-2), jnp.max(jnp.where(keep, key, -jnp.inf), axis=-2)], axis=-1
    )
    tokens = jnp.where(keep, pages.astype(jnp.float32), 0.0)
    mean = total(tokens, -2) / jnp.maximum(num_tokens, 1).astype(jnp.float32)[None, ..., None]
    apart = jnp.where(keep, value.astype(jnp.float32) - mean[..., None, d : 2 * d], 0.0)
    pad = [(0, 0)] * (box.ndim - 1) + [(0, e - 2 * d)]
    return PageSummary(
        key_box=jnp.pad(box, pad),
        mean=mean,
        value_radius=jnp.sqrt(jnp.max(total(apart * apart), axis=-1)),
    )


def encode(key: Float[Array, "k *p s d"], key_box: Float[Array, "k *p e"]) -> Int8[Array, "k *p sd"]:
    """Return the 8-bit codes of pages of keys within their box."""
    d = key.shape[-1]
    low, high = key_box[..., :d].astype(jnp.float32), key_box[..., d : 2 * d].astype(jnp.float32)
    scale = ((high - low) / 255.0)[..., None, :]
    code = (key.astype(jnp.float32) - low[..., None, :]) / jnp.where(scale > 0, scale, 1.0) - 128.0
    code = jnp.clip(jnp.round(code), -128.0, 127.0)
    return code.astype(jnp.int8).reshape(*key.shape[:-2], -1)


def with_place(cache: KVCache, place: int, cached: LayerCache) -> KVCache:
    """Return the cache with other pages at a place."""
    return replace(cache, layers=(*cache.layers[:place], cached, *cache.layers[place + 1 :]))


def put_layer(place: LayerCache, pages: Int[Array, " m"], taken: LayerCache) -> LayerCache:
    """Return the arrays of a place with the pages of `taken`, of one layer, over these, whose numbers are its own.

    Every axis but the last is indexed: a window over heads makes XLA lay the pool out anew in a loop on TPU.
    """

    def over(x: Array, y: Array) -> Array:
        index = [jnp.arange(size) for size in x.shape[: max(x.ndim - 1, 2)]]
        index[1] = pages
        return x.at[jnp.ix_(*index)].set(y, mode="drop")

    return jax.tree.map(over, place, replace(taken, depth=place.depth))


def take_pages(cache: KVCache, pages: Int[Array, " m"]) -> KVCache:
    """Return a cache of the listed pages alone, summaries and codes included."""

    def taken(place: LayerCache) -> LayerCache:
        at = place.of_all(pages)
        return jax.tree.map(lambda x: x[:, at], place)

    layers = tuple(map(taken, cache.layers))
    return KVCache(layers=layers, surprisal=None if cache.surprisal is None else cache.surprisal[pages])


def put_pages(cache: KVCache, pages: Int[Array, " m"], taken: KVCache) -> KVCache:
    """Return the cache with the pages of `taken` over the listed ones; those beyond the pool are left out."""

    def put_all(place: LayerCache, one: LayerCache) -> LayerCache:
        at = place.of_all(pages)
        return jax.tree.map(lambda x, y: x.at[:, at].set(y, mode="drop"), place, one)

    layers = tuple(map(put_all, cache.layers, taken.layers))
    surprisal = cache.surprisal
    if surprisal is not None:
        surprisal = surprisal.at[pages].set(taken.surprisal, mode="drop")
    return KVCache(layers=layers, surprisal=surprisal)

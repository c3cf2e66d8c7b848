"""Summaries of pages: boxes, means and radii of their keys and values, and 8-bit codes of keys."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8, Shaped

from et_jax.decode.cache.eight_bits import scaled
from et_jax.pallas.backend import platform
from et_jax.pallas.checks import code_rows
from et_jax.pallas.per_head import Pages, PerHead, per_head_into
from et_jax.sums import total
from et_jax.types import pytree

PIECE = 32  # blocks whose mean values are gathered at once on a CPU


@pytree
class PageSummary:
    """The summary of each page, valid once all its tokens are written.

    `key_box` has the channelwise minimum of the keys in its first half and the maximum in its second;
    `mean` the mean key, then the mean value; `value_radius` the greatest distance of a value from the
    mean value. The layout is that of a cached token, key part first.
    """

    key_box: Float[Array, "k *p e"]
    mean: Float[Array, "k *p e"]
    value_radius: Float[Array, "k *p"]


@pytree
class OnePage:
    """The summary of one page of one KV head, in float32."""

    key_min: Float[Array, " d"]
    key_max: Float[Array, " d"]
    key_mean: Float[Array, " d"]
    value_mean: Float[Array, " d"]
    value_radius: Float[Array, ""]


def summary_of(key: Float[Array, "s d"], value: Float[Array, "s d"], counts: Bool[Array, " s"]) -> OnePage:
    """Return the summary of one page, of whose tokens `counts` are valid."""
    keep, num_tokens = counts[:, None], jnp.maximum(jnp.sum(counts, dtype=jnp.int32), 1).astype(jnp.float32)
    mean = total(jnp.where(keep, value.astype(jnp.float32), 0.0), 0) / num_tokens
    apart = jnp.where(keep, value.astype(jnp.float32) - mean, 0.0)
    return OnePage(
        key_min=jnp.min(jnp.where(keep, key, jnp.inf), axis=0).astype(jnp.float32),
        key_max=jnp.max(jnp.where(keep, key, -jnp.inf), axis=0).astype(jnp.float32),
        key_mean=total(jnp.where(keep, key.astype(jnp.float32), 0.0), 0) / num_tokens,
        value_mean=mean,
        value_radius=jnp.sqrt(jnp.max(total(apart * apart))),
    )


def summarise(pages: Float[Array, "k *p s e"], num_tokens: Int[Array, "*p"], head_dim: int) -> PageSummary:
    """Return the summary of `pages`, of whose tokens the first `num_tokens` are valid."""
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


def encode(key: Float[Array, "k *p s d"], key_box: Float[Array, "k *p e"]) -> Int8[Array, "k *p r w"]:
    """Return the 8-bit codes of pages of keys within their box, in the rows of `checks.code_rows`."""
    s, d = key.shape[-2:]
    low, high = key_box[..., :d].astype(jnp.float32), key_box[..., d : 2 * d].astype(jnp.float32)
    return coded_in(key, low, high).reshape(*key.shape[:-2], *code_rows(s, d))


def coded_in(
    key: Float[Array, "*p s d"], low: Float[Array, "*p d"], high: Float[Array, "*p d"]
) -> Int8[Array, "*p s d"]:
    """Return the 8-bit codes of keys between a minimum and a maximum, in float32."""
    scale = ((high - low) / 255.0)[..., None, :]
    code = (key.astype(jnp.float32) - low[..., None, :]) / jnp.where(scale > 0, scale, 1.0) - 128.0
    code = jnp.clip(jnp.round(code), -128.0, 127.0)
    return code.astype(jnp.int8)


def summarised(
    old: PageSummary,
    codes: Int8[Array, "k p r w"] | None,
    tokens: Float[Array, "k *b s e"],
    page: Int[Array, "*b"],
    head_dim: int,
) -> tuple[PageSummary, Int8[Array, "k p r w"] | None]:
    """Return the summaries and codes of a layer, updated by these full pages. Pages past the end are dropped.

    `tokens` are those of the pages, dequantized.
    """
    fresh = summarise(tokens, jnp.full(page.shape, tokens.shape[-2], jnp.int32), head_dim)
    if codes is not None:
        codes = codes.at[:, page].set(encode(tokens[..., :head_dim], fresh.key_box), mode="drop")
    fresh = jax.tree.map(lambda pool, new: new.astype(pool.dtype), old, fresh)
    if platform() != "tpu":
        return jax.tree.map(lambda pool, new: pool.at[:, page].set(new, mode="drop"), old, fresh), codes
    from et_jax.pallas.store_rows import store_rows  # Mosaic takes long to import

    rows = [x.reshape(len(x), -1, x.shape[-1]) for x in (fresh.key_box, fresh.mean)]
    key_box, mean = store_rows([old.key_box, old.mean], page.reshape(-1), rows)
    radius = in_turn(old.value_radius, page, fresh.value_radius)
    return PageSummary(key_box=key_box, mean=mean, value_radius=radius), codes


def in_turn(
    pool: Shaped[Array, "k p *x"], page: Int[Array, "*b"], new: Shaped[Array, "k ..."]
) -> Shaped[Array, "k p *x"]:
    """Return a pool with `new` "k *b *x" stored page after page; pages past the end are dropped.

    Storing all of them at once makes XLA copy a pool of one head to another layout on a TPU.
    """
    k, num_pages, *rest = pool.shape
    page, new = page.reshape(-1), new.reshape(k, -1, *rest)

    def store(i: Int[Array, ""], pool: Shaped[Array, "k p *x"]) -> Shaped[Array, "k p *x"]:
        old, one = (jax.lax.dynamic_slice_in_dim(x, at, 1, axis=1) for x, at in ((pool, page[i]), (new, i)))
        return jax.lax.dynamic_update_slice_in_dim(pool, jnp.where(page[i] < num_pages, one, old), page[i], axis=1)

    return jax.lax.fori_loop(0, len(page), store, pool)


def summarised_by_kernel(
    old: PageSummary,
    codes: Int8[Array, "k p r w"] | None,
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    kv_scales: Float[Array, "k p 2 s"] | None,
    page: Int[Array, "b m"],
    head_dim: int,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    interpret: bool = False,
) -> tuple[PageSummary, Int8[Array, "k p r w"] | None]:
    """Return what `summarised` returns, by a GPU kernel. Page 0 is ignored; `turn` and `depth` are as in `Pages`."""
    d, page, width = head_dim, page.reshape(-1), old.key_box.shape[-1]

    def of_page(key: Array, value: Array, key_scale: Array | None, value_scale: Array | None) -> tuple:
        key, value = scaled(key, key_scale), scaled(value, value_scale)
        found = summary_of(key, value, jnp.ones(key.shape[0], bool))
        box = _side_by_side(found.key_min, found.key_max, width).astype(old.key_box.dtype)
        mean = _side_by_side(found.key_mean, found.value_mean, width)
        coded = None if codes is None else coded_in(key, found.key_min, found.key_max).reshape(codes.shape[2:])
        return box, mean, found.value_radius, coded

    scales = [None, None]
    if kv_scales is not None:
        places = page if turn is None else page + turn * (pages.shape[1] // depth)
        scales = [PerHead(array=kv_scales[:, places, i].swapaxes(0, 1)) for i in (0, 1)]
    layers = {"turn": turn, "depth": depth}
    parts = [Pages(pool=pages, page=page, columns=(first, first + d), **layers) for first in (0, d)]
    pools = old.key_box, old.mean, old.value_radius, codes
    box, mean, radius, codes = per_head_into(of_page, pools, page, *parts, *scales, **layers, interpret=interpret)
    return PageSummary(key_box=box, mean=mean, value_radius=radius), codes


def _side_by_side(x: Float[Array, " d"], y: Float[Array, " d"], width: int) -> Float[Array, " e"]:
    """The rows `x` and `y` side by side, then zeros up to `width`. Kernels have no `concatenate`."""
    d = x.shape[0]
    first, second = (jnp.broadcast_to(each, (width // d, d)).reshape(width) for each in (x, y))
    place = jnp.arange(width) // d
    return jnp.where(place == 0, first, jnp.where(place == 1, second, 0.0))


def of_blocks(pool: Float[Array, "k p e"], table: Int[Array, "b m"]) -> Float[Array, "b k m e"]:
    """Return the entries of every block of page tables.

    Heads are indexed too: a slice over one head makes XLA copy the pool to another layout on a TPU.
    """
    return pool[jnp.arange(len(pool))[:, None], table[:, None]]


def mean_values(mean: Float[Array, "k p e"], table: Int[Array, "b m"], head_dim: int) -> Float[Array, "b k m d"]:
    """Return the mean value of every block of page tables."""
    return of_blocks(mean, table)[..., head_dim : 2 * head_dim]

"""Tokens of listed pages, read from the pool with no copy of the pool."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def page_rows(page_table: Int[Array, "b n"], blocks: Int[Array, "b k m"], num_pages: int) -> Int[Array, "b*k m"]:
    """Return the row of each listed block's page in the pool seen as "k*p s e"."""
    b, k, m = blocks.shape
    pages = jnp.take_along_axis(page_table[:, None], blocks, axis=2, mode="clip")
    heads = jnp.arange(k, dtype=jnp.int32)[:, None] * num_pages
    return (pages + heads).reshape(b * k, m)


def listed_scales(
    kv_scales: Float[Array, "k p 2"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"],
    counts: Int[Array, "b k"],
) -> Float[Array, "b k 2 m"]:
    """Return the scales of each listed page's keys and values; 0 past the end of a list, where a page may hold NaN."""
    p = kv_scales.shape[1]
    b, k, m = blocks.shape
    listed = jnp.arange(blocks.shape[2], dtype=jnp.int32) < counts[..., None]
    rows = page_rows(page_table, jnp.where(listed, blocks, 0), p)
    # one flat array each: XLA would pad pairs to whole lanes and copy them so
    scales = jnp.stack([kv_scales[..., i].reshape(-1)[rows].reshape(b, k, m) for i in range(2)], axis=2)
    return jnp.where(listed[:, :, None], scales, 0.0)


def tokens(
    pages: Shaped[Array, "k p s e"], rows: Int[Array, "x m"], start: int, width: int
) -> Shaped[Array, "x m*s {width}"]:
    """Return columns [start, start + width) of every token of the listed pages.

    One gather with the columns in its slice: to slice pages first copies the pool, to slice what was
    gathered copies the tokens once more.
    """
    k, p, s, e = pages.shape
    x, m = rows.shape
    corners = jnp.stack([rows.reshape(-1), jnp.full((x * m,), start, jnp.int32)], axis=1)
    dims = lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(0,), start_index_map=(0, 2))
    gathered = lax.gather(
        pages.reshape(k * p, s, e),
        corners,
        dims,
        slice_sizes=(1, s, width),
        mode=jax.lax.GatherScatterMode.CLIP,
    )
    return gathered.reshape(x, m * s, width)

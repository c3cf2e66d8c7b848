"""Gathers of tokens of listed pages from the pool, without a copy of the pool."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped


def page_rows(page_table: Int[Array, "b n"], blocks: Int[Array, "b k m"], num_pages: int) -> Int[Array, "b*k m"]:
    """Return the row of each listed block's page in the pool viewed as "k*p s e"."""
    b, k, m = blocks.shape
    pages = jnp.take_along_axis(page_table[:, None], blocks, axis=2, mode="clip")
    heads = jnp.arange(k, dtype=jnp.int32)[:, None] * num_pages
    return (pages + heads).reshape(b * k, m)


def token_scales(
    kv_scales: Float[Array, "k p 2 s"], rows: Int[Array, "x m"]
) -> tuple[Float[Array, "x m s"], Float[Array, "x m s"]]:
    """Return the scales of the keys and of the values of every token of the listed pages."""
    k, p, _, s = kv_scales.shape
    scales = kv_scales.reshape(k * p, 2, s).at[rows].get(mode="clip")
    return scales[:, :, 0], scales[:, :, 1]


def tokens(
    pages: Shaped[Array, "k p s e"], rows: Int[Array, "x m"], start: int, width: int
) -> Shaped[Array, "x m*s {width}"]:
    """Return columns [start, start + width) of every token of the listed pages.

    One gather with the columns in its slice: slicing the pages first would copy the pool, slicing the gathered
    tokens would copy them again.
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

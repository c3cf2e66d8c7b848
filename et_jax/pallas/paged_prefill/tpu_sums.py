"""The log-sum-exps of blocks, stored by the TPU kernel along the lanes of its output."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from et_jax.pallas.checks import LANES
from et_jax.softmax import finite


def store_sums(lse_ref, entry, scores, page_size):
    """Store the log-sum-exps of a group's blocks at list positions from `entry` on, along the lanes.

    Each is relative to its own block's maximum, so that a small sum is exact too. Scores are cut at full
    lanes; blocks that share a lane group are selected by a mask, one after the other.
    """
    chunk = pl.ds(pl.multiple_of(entry // LANES * LANES, LANES), LANES)
    _, g, tile, _ = lse_ref.shape
    span = scores.shape[1]
    width = max(page_size, LANES) if page_size % LANES == 0 or LANES % page_size == 0 else span
    lse = lse_ref[0, :, :, chunk].reshape(g * tile, LANES)
    lane = lax.broadcasted_iota(jnp.int32, lse.shape, 1) - entry % LANES
    for start in range(0, span, width):
        share = scores[:, start : start + width]
        place = lax.broadcasted_iota(jnp.int32, (1, share.shape[1]), 1)

        def add_block(j, lse, start=start, share=share, place=place):
            own = (place >= j * page_size) & (place < (j + 1) * page_size)
            block = jnp.where(own, share, -jnp.inf)
            maximum = finite(jnp.max(block, axis=1, keepdims=True))
            total = jnp.sum(jnp.exp(block - maximum), axis=1, keepdims=True)
            return jnp.where(lane == start // page_size + j, maximum + jnp.log(total), lse)

        lse = lax.fori_loop(0, share.shape[1] // page_size, add_block, lse)
    lse_ref[0, :, :, chunk] = lse.reshape(g, tile, LANES)

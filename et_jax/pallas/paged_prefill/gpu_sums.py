"""The log-sum-exps of blocks from those that the GPU kernel writes for tiles."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.pallas.hopper import TILE


def tiles_seen(
    starts: Int[Array, " b"],
    blocks: Int[Array, "b k m"] | None,
    counts: Int[Array, "b k"] | None,
    shape: tuple[int, ...],
    window: int | None,
) -> Bool[Array, "b #k m tiles t"]:
    """Return which queries attend to any token of which tiles, in the shape of tile sums; no other sum is written."""
    _, _, m, tiles, t, _ = shape
    entry = jnp.arange(m, dtype=jnp.int32)
    block = entry[None, None] if blocks is None else blocks
    position = (starts[:, None] + jnp.arange(t, dtype=jnp.int32))[:, None, None, None]
    token = (block[..., None] * tiles + jnp.arange(tiles, dtype=jnp.int32))[..., None] * TILE
    seen_mask = token <= position
    if window is not None:
        seen_mask &= position - (token + TILE - 1) < window
    return seen_mask if counts is None else seen_mask & (entry < counts[..., None])[..., None, None]


def block_sums(
    tile_lse: Float[Array, "b k m tiles t g"], seen_mask: Bool[Array, "b #k m tiles t"]
) -> Float[Array, "b t h m"]:
    """Return the log-sum-exp of each block from those of its tiles, -inf if no token is visible."""
    b, k, m, tiles, t, group = tile_lse.shape
    tile_lse = jnp.where(seen_mask[..., None], tile_lse, -jnp.inf)
    lse = functools.reduce(jnp.logaddexp, (tile_lse[:, :, :, tile] for tile in range(tiles)))
    return lse.transpose(0, 3, 1, 4, 2).reshape(b, t, k * group, m)

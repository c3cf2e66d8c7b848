"""The threshold that cuts a list of blocks by score, found without sorting."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

Allowed = Callable[[Bool[Array, "g n"]], Bool[Array, " g"]]
"""Whether each row may have no more than these blocks open."""


def above_threshold(score: Float[Array, "g n"], allowed: Allowed) -> Bool[Array, "g n"]:
    """Return the blocks to open in each row: those whose score reaches the greatest cut that `allowed` permits.

    If `allowed(opened)` is false it must be false with fewer open; if it is false with all open, all are. Ties
    open together, and the best block always. The cut is searched among the 32-bit patterns of the scores,
    so it is exact: by bisection, which ends at once if the best blocks suffice; on a GPU, where every turn
    of such a loop synchronises with the host, by radix search. Scores are not NaN.
    """
    keys = ordered(score.astype(jnp.float32))
    radix, bisected = (partial(find, allowed) for find in (radix_search, bisection))
    return keys >= jax.lax.platform_dependent(keys, cuda=radix, rocm=radix, default=bisected)[:, None]


def bisection(allowed: Allowed, keys: UInt32[Array, "g n"]) -> UInt32[Array, " g"]:
    """Return the greatest allowed cut, or the least key, by halving its interval."""
    least, most = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)

    def narrowed(bounds: tuple[UInt32[Array, " g"], ...]) -> tuple[UInt32[Array, " g"], ...]:
        low, high, cut = bounds  # a cut at low is allowed or opens all; one above high is not allowed or opens nothing
        fine = allowed(keys >= cut[:, None]) | (low == high)
        low, high = jnp.where(fine, cut, low), jnp.where(fine, high, cut - 1)
        return low, high, low + (high - low) // 2 + (high - low) % 2

    low, _, _ = jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), narrowed, (least, most, most))
    return low


def radix_search(allowed: Allowed, keys: UInt32[Array, "g n"]) -> UInt32[Array, " g"]:
    """Return the same cut by radix search: per byte, the greatest allowed of 256 cuts tested at once."""
    low = jnp.min(keys, axis=-1)
    room = jnp.max(keys, axis=-1) - low  # a cut at low is allowed or opens all; none above low + room opens any
    for shift in (24, 16, 8, 0):
        ahead = jnp.arange(256, dtype=jnp.uint32)[:, None] << shift
        fine = jax.vmap(lambda cut: allowed(keys >= cut[:, None]))(low + ahead) & (ahead <= room)
        taken = jnp.max(jnp.where(fine, ahead, 0), axis=0)
        low, room = low + taken, jnp.minimum(room - taken, jnp.uint32((1 << shift) - 1))
    return low


def ordered(x: Float[Array, "g n"]) -> UInt32[Array, "g n"]:
    """Return float32 as integers in the same order; both zeros are equal."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))

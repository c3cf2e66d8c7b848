"""Where to cut a list of blocks by score, without sorting it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32


def above_threshold(
    score: Float[Array, "g n"], allowed: Callable[[Bool[Array, "g n"]], Bool[Array, " g"]]
) -> Bool[Array, "g n"]:
    """Return the blocks to open in each row: those whose score reaches the greatest cut that `allowed` permits.

    Once `allowed(opened)` fails it must fail with fewer open; where it fails with all open, all are. Ties
    open together, and the best block always. The cut is bisected over the 32-bit patterns of the scores,
    so it is exact. Where the best blocks are enough, nothing is bisected. Scores are not NaN.
    """
    keys = _ordered(score.astype(jnp.float32))
    least, most = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)

    def narrowed(bounds: tuple[UInt32[Array, " g"], ...]) -> tuple[UInt32[Array, " g"], ...]:
        low, high, cut = bounds  # a cut at low is allowed or opens all; one above high is not allowed or opens nothing
        fine = allowed(keys >= cut[:, None]) | (low == high)
        low, high = jnp.where(fine, cut, low), jnp.where(fine, high, cut - 1)
        return low, high, low + (high - low) // 2 + (high - low) % 2

    low, _, _ = jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), narrowed, (least, most, most))
    return keys >= low[:, None]


def _ordered(x: Float[Array, "g n"]) -> UInt32[Array, "g n"]:
    """Map float32 to integers in the same order, both zeros to one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))

"""Where to cut a list of blocks by score, without sorting it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def above_threshold(
    score: Float[Array, "g n"], allowed: Callable[[Bool[Array, "g n"]], Bool[Array, " g"]]
) -> Bool[Array, "g n"]:
    """Return the blocks to open in each row: those whose score reaches the greatest cut that `allowed` permits.

    Once `allowed(opened)` fails it must fail with fewer open; where it fails with all open, all are. Ties
    open together, and the best block always. The cut is bisected over the 32-bit patterns of the scores,
    so it is exact. Scores are not NaN.
    """
    keys = _ordered(score.astype(jnp.float32))

    def halve(_: Int[Array, ""], bounds: tuple[UInt32[Array, " g"], UInt32[Array, " g"]]):
        low, high = bounds  # a cut at low is allowed or opens all; one above high is not allowed or opens nothing
        middle = low + (high - low) // 2 + (high - low) % 2
        fine = allowed(keys >= middle[:, None])
        return jnp.where(fine, middle, low), jnp.where(fine, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)))
    return keys >= low[:, None]


def _ordered(x: Float[Array, "g n"]) -> UInt32[Array, "g n"]:
    """Map float32 to integers in the same order, both zeros to one."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))

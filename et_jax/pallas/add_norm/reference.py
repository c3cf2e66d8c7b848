"""The definition of `add_norm`, in plain jax.numpy: for reading, not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def add_norm(
    x: Float[Array, "n w"],
    more: Float[Array, "n w"],
    weights: Float[Array, "l w"],
    layer: Int[Array, ""],
    *,
    eps: float,
    offset: float = 0.0,
) -> tuple[Float[Array, "n w"], Float[Array, "n w"]]:
    """Return what `api.add_norm` documents."""
    x = x + more.astype(x.dtype)
    x32 = x.astype(jnp.float32)
    scaled = x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) / x.shape[-1] + eps)
    return x, (scaled * (weights[layer].astype(jnp.float32) + offset)).astype(x.dtype)

"""Float sums in an order that the code fixes: a row has the same bits however many rows stand beside it.

Asked for a sum, XLA on a CPU takes one order where its operand has 4096 elements or more, all rows together, and
another below. So a row of fewer than half as many is summed here by adding its halves to each other, which no
compiler may reorder; it takes no longer. Of longer rows any two have enough elements.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LIBRARY = 4096 // 2  # elements of a row from which on any two are summed by XLA in one order


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def total(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Return the sum over an axis."""
    if x.shape[axis] == 0 or x.shape[axis] >= _LIBRARY:
        return jnp.sum(x, axis=axis)
    return jax.lax.platform_dependent(x, cpu=partial(_halved, axis=axis), default=partial(jnp.sum, axis=axis))


@total.defjvp
def _(axis: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return total(primals[0], axis), jnp.sum(tangents[0], axis=axis)


def _halved(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    x = rounded(x)
    cut = partial(jax.lax.slice_in_dim, x, axis=axis)
    size = x.shape[axis]
    half = 1 << (size.bit_length() - 1)
    if half < size:  # the first halving leaves a power of two
        x = jnp.concatenate([cut(0, size - half) + cut(half, size), cut(size - half, half)], axis=axis)
    while half > 1:
        half //= 2
        x = jax.lax.slice_in_dim(x, 0, half, axis=axis) + jax.lax.slice_in_dim(x, half, 2 * half, axis=axis)
    return jnp.squeeze(x, axis)


def rounded(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return `x` as float32 holds it: a product or difference that is fused into what follows may not be rounded."""
    return jax.lax.optimization_barrier(x)


def log_sum_exp(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Return log sum e^x over an axis; -inf where all of it is."""
    peak = jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    return jnp.log(total(jnp.exp(x - peak), axis)) + jnp.squeeze(peak, axis)


def log_softmax(x: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    """Return the log of softmax over the last axis."""
    shifted = x - jnp.max(x, axis=-1, keepdims=True)
    return shifted - jnp.log(total(jnp.exp(shifted)))[..., None]


def softmax(x: Float[Array, "*b n"]) -> Float[Array, "*b n"]:
    """Return softmax over the last axis."""
    weight = jnp.exp(rounded(x - jnp.max(x, axis=-1, keepdims=True)))
    return weight / total(weight)[..., None]


def length(x: Float[Array, "*b n"]) -> Float[Array, "*b"]:
    """Return the Euclidean length over the last axis."""
    return jnp.sqrt(total(x * x))

"""Float sums in an order that the code fixes: a row has the same bits however many rows stand beside it.

Asked for a sum, XLA on a CPU takes one order where its operand has 4096 elements or more, all rows together, and
another below. So a row of fewer than half as many is summed here by adding its halves to each other, which no
compiler may reorder; it takes no longer. Of longer rows any two have enough elements.

Zeros at a row's end change no bit of such a sum, however many they are.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

_LIBRARY = 4096 // 2  # elements of a row from which on any two are summed by XLA in one order
_LANES = 128  # elements side by side to which a row is folded at once


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def total(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Return the sum over an axis."""
    if x.shape[axis] == 0 or x.shape[axis] >= _LIBRARY:
        return jnp.sum(x, axis=axis)
    return jax.lax.platform_dependent(x, cpu=lambda x: _halved(rounded(x), axis), default=partial(jnp.sum, axis=axis))


@total.defjvp
def _(axis: int, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    return total(primals[0], axis), jnp.sum(tangents[0], axis=axis)


def total_where(x: Float[Array, "*b n"], mask: Bool[Array, "*b n"]) -> Float[Array, "*b"]:
    """Return the sum over the last axis of what a mask keeps, to the bits of `total`; the rest counts as 0."""

    def library(x: Float[Array, "*b n"], mask: Bool[Array, "*b n"]) -> Float[Array, "*b"]:
        return jnp.sum(jnp.where(mask, x, 0.0), axis=-1)

    if x.shape[-1] == 0 or x.shape[-1] >= _LIBRARY:
        return library(x, mask)
    return jax.lax.platform_dependent(
        x, mask, cpu=lambda x, mask: _halved(jnp.where(mask, rounded(x), 0.0), -1), default=library
    )


def _halved(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    axis %= x.ndim
    size = x.shape[axis]
    lanes = min(_LANES, 1 << (size - 1).bit_length())
    # all pieces of a row in one expression, which XLA makes one loop of
    pieces = [jax.lax.slice_in_dim(x, i, min(i + lanes, size), axis=axis) for i in range(0, size, lanes)]
    widths = [(0, -size % lanes if i == axis else 0, 0) for i in range(x.ndim)]
    pieces[-1] = jax.lax.pad(pieces[-1], jnp.asarray(-0.0, x.dtype), widths)  # -0 leaves any number as it is
    while len(pieces) > 1:
        half = 1 << ((len(pieces) - 1).bit_length() - 1)
        pieces = [*map(jnp.add, pieces[:-half], pieces[half:]), *pieces[len(pieces) - half : half]]
    [x] = pieces
    while lanes > 1:
        lanes //= 2
        x = jax.lax.slice_in_dim(x, 0, lanes, axis=axis) + jax.lax.slice_in_dim(x, lanes, 2 * lanes, axis=axis)
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

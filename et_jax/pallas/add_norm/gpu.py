"""`add_norm` for NVIDIA GPUs, by Triton: one program per row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int


def add_norm(
    x: Float[Array, "n w"],
    more: Float[Array, "n w"],
    weights: Float[Array, "l w"],
    layer: Int[Array, ""],
    *,
    eps: float,
    offset: float = 0.0,
    interpret: bool = False,
) -> tuple[Float[Array, "n w"], Float[Array, "n w"]]:
    """Return what `api.add_norm` documents. `interpret` runs the kernel on a CPU, for tests."""
    n, w = x.shape
    padded = pl.next_power_of_2(w)

    def kernel(x_ref: Any, more_ref: Any, weights_ref: Any, layer_ref: Any, sum_ref: Any, normed_ref: Any) -> None:
        row, column = pl.program_id(0), jnp.arange(padded)
        there = column < w

        def loaded(ref: Any, row: Any) -> Array:
            return triton.load(ref.at[row, column], mask=there, other=0.0)

        more = loaded(more_ref, row).astype(x_ref.dtype).astype(jnp.float32)
        x = (loaded(x_ref, row).astype(jnp.float32) + more).astype(x_ref.dtype)
        x32 = x.astype(jnp.float32)
        scaled = x32 * jax.lax.rsqrt(jnp.sum(x32 * x32) / w + eps)
        normed = scaled * (loaded(weights_ref, layer_ref[0]).astype(jnp.float32) + offset)
        triton.store(sum_ref.at[row, column], x, mask=there)
        triton.store(normed_ref.at[row, column], normed.astype(x.dtype), mask=there)

    shape = jax.ShapeDtypeStruct((n, w), x.dtype)
    return pl.pallas_call(
        kernel,
        grid=(n,),
        out_shape=(shape, shape),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="add_norm",
    )(x, more, weights, layer.reshape(1))

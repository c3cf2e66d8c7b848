"""What the parts of a list have found, put together: one kernel, by Triton.

A program takes some columns of the values of one KV head of one slot, and meets the parts a few at a time, as many
whatever the list: parts that were never used change no bit, nor do other slots. XLA took four kernels for this.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from et_jax.softmax import finite

PARTS = 16  # met at a time
VALUES = 16  # columns of values of a program


def combined(
    maximum: Float[Array, "b k n c"],
    total: Float[Array, "b k n c"],
    mixed: Float[Array, "b k n d c"],
    counting: tuple[Array | None, ...],
    sinks: Float[Array, " h"] | None,
    *,
    used: Callable[..., Any],
    rows: int,
    queries: int,
    dtype: DTypeLike,
    num_rows: int,
    interpret: bool,
) -> Float[Array, "r h d"]:
    """Return attention from the first of its n parts, each relative to its own maximum; logits have base 2.

    How many parts count, `used` says of refs of the arrays in `counting`, a slot and a KV head. Of the c columns the
    first are `queries` of each of a slot's `rows`. There are `num_rows` rows, those past the slots' own 0: so a caller
    that wants more has them in this kernel.
    """
    b, k, _, d, columns = mixed.shape
    padded = pl.next_power_of_2(columns)

    def kernel(
        maximum_ref: Any, total_ref: Any, mixed_ref: Any, counting_refs: Any, sinks_ref: Any, out_ref: Any
    ) -> None:
        slot, head = pl.program_id(0), pl.program_id(1)
        column, value = jnp.arange(padded), pl.program_id(2) * VALUES + jnp.arange(VALUES)
        there = column < rows * queries
        count = jnp.where(slot < b, used(*counting_refs, jnp.minimum(slot, b - 1), head), 0)

        def meet(i: Any, carry: tuple) -> tuple:
            top, sofar, values = carry
            part = i * PARTS + jnp.arange(PARTS)
            mask = (part < count)[:, None] & there
            at = (slot, head, part[:, None], column[None])
            maximum = triton.load(maximum_ref.at[at], mask=mask, other=-jnp.inf)
            total = triton.load(total_ref.at[at], mask=mask, other=0.0)
            at = (slot, head, part[:, None, None], value[None, :, None], column[None, None])
            mask = jnp.broadcast_to(mask[:, None], (PARTS, VALUES, padded))
            mixed = triton.load(mixed_ref.at[at], mask=mask, other=0.0)
            higher = jnp.maximum(top, jnp.max(maximum, axis=0))
            decay, weight = jnp.exp2(top - finite(higher)), jnp.exp2(maximum - finite(higher)[None])
            sofar = sofar * decay + jnp.sum(total * weight, axis=0)
            values = values * decay[None] + jnp.sum(mixed * weight[:, None], axis=0)
            return higher, sofar, values

        nothing = (
            jnp.full((padded,), -jnp.inf, jnp.float32),
            jnp.zeros((padded,), jnp.float32),
            jnp.zeros((VALUES, padded), jnp.float32),
        )
        top, sofar, values = lax.fori_loop(0, lax.div(count + (PARTS - 1), PARTS), meet, nothing)
        row, query_head = lax.div(column, queries), head * queries + lax.rem(column, queries)
        if sinks_ref is not None:
            sink = triton.load(sinks_ref.at[query_head], mask=there, other=-jnp.inf)
            higher = jnp.maximum(top, sink)
            decay = jnp.exp2(top - finite(higher))
            sofar, values = sofar * decay + jnp.exp2(sink - finite(higher)), values * decay[None]
        values = values / jnp.where(sofar == 0.0, 1.0, sofar)[None]
        at = ((slot * rows + row)[None], query_head[None], value[:, None])
        mask = jnp.broadcast_to((there & (slot * rows + row < num_rows))[None], values.shape)
        triton.store(out_ref.at[at], values.astype(out_ref.dtype), mask=mask)

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_rows, rows), k, d // VALUES),
        out_shape=jax.ShapeDtypeStruct((num_rows, k * queries, d), dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="combine_parts",
    )(maximum, total, mixed, counting, sinks)

"""`add_residual` for NVIDIA GPUs, by Triton: one program per row, KV head and group of columns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

BLOCKS = 32  # added at a time, whatever the size of the table: further blocks change no bit
VALUES = 16  # columns of a program at most


def add_residual(
    out: Float[Array, "q h d"],
    read: Float[Array, "b k g"],
    weight: Float[Array, "b k g n"],
    total: Float[Array, "b k g"],
    mean: Float[Array, "k p e"],
    table: Int[Array, "b n"],
    *,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    interpret: bool = False,
) -> Float[Array, "q h d"]:
    """Return what `api.add_residual` documents. `interpret` runs the kernel on a CPU, for tests."""
    (b, k, group, n), d = weight.shape, out.shape[-1]
    padded, columns = pl.next_power_of_2(group), min(VALUES, d)

    def kernel(
        out_ref: Any,
        read_ref: Any,
        weight_ref: Any,
        total_ref: Any,
        mean_ref: Any,
        table_ref: Any,
        turn_ref: Any,
        found_ref: Any,
    ) -> None:
        row, head, first = pl.program_id(0), pl.program_id(1), pl.program_id(2) * columns
        query, value = jnp.arange(padded), first + jnp.arange(columns)
        there = (query < group) & (row < b)
        first_page = 0 if turn_ref is None else turn_ref[0] * (mean_ref.shape[1] // depth)

        def add(i: Any, sofar: Array) -> Array:
            block = i * BLOCKS + jnp.arange(BLOCKS)
            mask = there[:, None] & (block < n)
            weight = triton.load(weight_ref.at[row, head, query[:, None], block[None]], mask=mask, other=0.0)
            page = triton.load(table_ref.at[row, block], mask=(block < n) & (row < b), other=0)
            counts = jnp.broadcast_to((jnp.max(weight, axis=0) > 0)[:, None], (BLOCKS, columns))
            means = triton.load(mean_ref.at[head, first_page + page[:, None], d + value[None]], mask=counts, other=0.0)
            return sofar + jnp.sum(weight[:, :, None] * means[None], axis=1)

        added = lax.fori_loop(0, pl.cdiv(n, BLOCKS), add, jnp.zeros((padded, columns), jnp.float32))
        read, total = (
            triton.load(ref.at[row, head, query], mask=there, other=0.0)[:, None] for ref in (read_ref, total_ref)
        )
        at = (row, (head * group + query)[:, None], value[None])
        there = jnp.broadcast_to(there[:, None], added.shape)
        attended = triton.load(out_ref.at[at], mask=there, other=0.0).astype(jnp.float32)
        found = (read * attended + added) / jnp.where(total > 0, total, 1.0)
        heads = jnp.broadcast_to((query < group)[:, None], added.shape)
        triton.store(found_ref.at[at], found.astype(found_ref.dtype), mask=heads)

    return pl.pallas_call(
        kernel,
        grid=(len(out), k, d // columns),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="add_residual",
    )(out, read, weight, total, mean, table, turn)

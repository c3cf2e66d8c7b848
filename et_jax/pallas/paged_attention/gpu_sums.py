"""Merges the parts of a list into attention and the log-sum-exps of its blocks: one Triton kernel.

A program processes some columns of the values of one KV head of one slot. It adds a fixed number of parts at a time,
so unused parts and other slots change no bit. XLA would launch four kernels for the attention, and one for the blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from et_jax.softmax import finite

PARTS = 16  # merged at a time
VALUES = 16  # columns of values per program
ENTRIES = 32  # of a list, whose log-sum-exps a program writes at a time


def combined(
    maximum: Float[Array, "b k n c"],
    total: Float[Array, "b k n c"],
    mixed: Float[Array, "b k n d c"],
    tile_lse: Float[Array, "b k _ t c"] | None,
    counting: tuple[Array | None, ...],
    sinks: Float[Array, " h"] | None,
    *,
    counted: Callable[..., Any],
    part: int,
    m: int,
    rows: int,
    queries: int,
    dtype: DTypeLike,
    num_rows: int,
    interpret: bool,
) -> Sequence[Array]:
    """Return attention "r h d" from the n parts, each relative to its own maximum, and log-sum-exps "q h m" if any.

    Logits have base 2. `counted` returns the number of list entries from refs of the arrays in `counting`, a slot and a
    KV head. A part has `part` entries, a list `m`. The first of the c columns are `queries` of each of a slot's `rows`.
    `num_rows` is r: rows past the slots' own are 0. `tile_lse` has the log-sum-exp of each of the t tiles of an entry,
    in nats, and is undefined past the last entry. Log-sum-exps are of the slots' own rows only, -inf past the
    last entry.
    """
    b, k, _, d, columns = mixed.shape
    padded = pl.next_power_of_2(columns)
    tiles = 0 if tile_lse is None else tile_lse.shape[3]

    def kernel(
        maximum_ref: Any,
        total_ref: Any,
        mixed_ref: Any,
        tile_lse_ref: Any,
        counting_refs: Any,
        sinks_ref: Any,
        out_ref: Any,
        lse_ref: Any = None,
    ) -> None:
        slot, head, tile_of_values = (pl.program_id(axis) for axis in range(3))
        column, value = jnp.arange(padded), tile_of_values * VALUES + jnp.arange(VALUES)
        there = column < rows * queries
        row, query_head = lax.div(column, queries), head * queries + lax.rem(column, queries)
        entries = jnp.where(slot < b, counted(*counting_refs, jnp.minimum(slot, b - 1), head), 0)
        count = lax.div(entries + (part - 1), part)

        def write_sums(i: Any, _: None) -> None:
            entry = (i * (d // VALUES) + tile_of_values) * ENTRIES + jnp.arange(ENTRIES)
            mask, sums = (entry < entries)[:, None] & there, jnp.full((ENTRIES, padded), -jnp.inf, jnp.float32)
            for tile in range(tiles):
                at = (slot, head, entry[:, None], tile, column[None])
                found = triton.load(tile_lse_ref.at[at], mask=mask, other=-jnp.inf)
                top = finite(jnp.maximum(sums, found))
                sums = found if tiles == 1 else top + jnp.log(jnp.exp(sums - top) + jnp.exp(found - top))
            at = ((slot * rows + row)[None], query_head[None], entry[:, None])
            triton.store(lse_ref.at[at], sums, mask=(entry < m)[:, None] & there & (slot < b))

        if lse_ref is not None:
            lax.fori_loop(0, pl.cdiv(m, ENTRIES * (d // VALUES)), write_sums, None)

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
        if sinks_ref is not None:
            sink = triton.load(sinks_ref.at[query_head], mask=there, other=-jnp.inf)
            higher = jnp.maximum(top, sink)
            decay = jnp.exp2(top - finite(higher))
            sofar, values = sofar * decay + jnp.exp2(sink - finite(higher)), values * decay[None]
        values = values / jnp.where(sofar == 0.0, 1.0, sofar)[None]
        at = ((slot * rows + row)[None], query_head[None], value[:, None])
        mask = jnp.broadcast_to((there & (slot * rows + row < num_rows))[None], values.shape)
        triton.store(out_ref.at[at], values.astype(out_ref.dtype), mask=mask)

    out_shapes = [jax.ShapeDtypeStruct((num_rows, k * queries, d), dtype)]
    if tile_lse is not None:
        out_shapes.append(jax.ShapeDtypeStruct((b * rows, k * queries, m), jnp.float32))
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(num_rows, rows), k, d // VALUES),
        out_shape=out_shapes,
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="combine_parts",
    )(maximum, total, mixed, tile_lse, counting, sinks)

"""The program for one part of a list of `paged_attention` for Hopper GPUs, in Mosaic GPU; `gpu` describes it."""

import functools
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from et_jax.pallas.hopper import LOG2_E, TILE, below, beside, convert, load, product, store
from et_jax.pallas.paged_attention.lists import lengths_of, seen
from et_jax.softmax import Softmax, finite

PRODUCER, CONSUMER = 0, 1


def attend_part(
    *,
    # inputs, in global memory
    q_ref: Any,
    pages_ref: Any,
    table_ref: Any,
    lengths_ref: Any,
    blocks_ref: Any = None,  # both with lists only
    counts_ref: Any = None,
    skipped_ref: Any = None,  # without lists, if KV heads skip leading blocks
    turn_ref: Any = None,  # for a pool of several layers
    scales_ref: Any = None,  # for a pool in 8 bits
    readers_ref: Any = None,  # if rows read different blocks of the list
    # outputs, in global memory
    maximum_ref: Any,
    total_ref: Any,
    mixed_ref: Any,
    lse_ref: Any,
    # scratch, in shared memory
    query_ref: Any,
    stages_ref: Any,
    weights_ref: Any,
    query_arrived: Any,
    tile_arrived: Any,
    stage_free: Any,
    scale_stages_ref: Any = None,  # both for a pool in 8 bits: a tile's scales, and the tile in bfloat16
    converted_ref: Any = None,
    # settings
    part: int,
    stages: int,
    softmax: Softmax,
    rows: int,
    queries: int,
    rows_per_slot: int,
    depth: int,
    simulated: bool,
) -> None:
    """Attend to one part of one list, for a number of rows with a number of queries each.

    Logits have base 2 until a tile's sum is written.
    """
    slot, head, number = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("part")
    warpgroup = lax.axis_index("warpgroup")
    first = number * part
    num_columns, d = query_ref.shape
    num_pages, page_size = pages_ref.shape[1:3]
    tiles = page_size // TILE
    begin = 0
    if blocks_ref is None:
        of_slot = lengths_of(lengths_ref, slot, rows, rows_per_slot)
        left_out = None if skipped_ref is None else skipped_ref[slot, head]
        begin, count = seen(of_slot, page_size, softmax.window, left_out)
    else:
        count = jnp.minimum(counts_ref[slot, head], blocks_ref.shape[2])
    count = jnp.clip(count - first, 0, part)
    base = 0 if turn_ref is None else turn_ref[0] * (num_pages // depth)

    def listed(i: Any) -> Any:
        """Return the block of the part's tile i."""
        entry = first + lax.div(i, tiles)
        return begin + entry if blocks_ref is None else blocks_ref[slot, head, entry]

    @pl.when((warpgroup == PRODUCER) & (count > 0))
    def _():
        def fetch(i, _):
            stage, tile = lax.rem(i, stages), lax.rem(i, tiles)
            page = base + table_ref[slot, listed(i)]

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(stage_free.at[stage])

            tokens = pages_ref.at[head, page, pl.ds(tile * TILE, TILE)]
            plgpu.copy_gmem_to_smem(tokens, stages_ref.at[stage], tile_arrived.at[stage])
            if scales_ref is not None:
                scales = scales_ref.at[head, page, :, pl.ds(tile * TILE, TILE)]
                plgpu.copy_gmem_to_smem(scales, scale_stages_ref.at[stage], tile_arrived.at[stage])

        lax.fori_loop(0, count * tiles, fetch, None)

    @pl.when((warpgroup == CONSUMER) & (count > 0))
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[slot, head], query_ref, query_arrived)
        lengths = [lengths_ref[slot * rows + row] for row in range(rows)]
        length = functools.reduce(jnp.maximum, lengths)
        behind = [length - each for each in lengths]
        row_of, lag = _rows_of_columns((TILE, num_columns), behind, queries)
        plgpu.barrier_wait(query_arrived)

        def meet(i, carry):
            maximum, total, mixed = carry
            stage, tile = lax.rem(i, stages), lax.rem(i, tiles)
            end = length - listed(i) * page_size - tile * TILE
            start = 0 if softmax.window is None else end - softmax.window
            more = i + stages < count * tiles  # a tile waits for this one's stage
            plgpu.barrier_wait(tile_arrived.at[stage])
            floats_ref = stages_ref.at[stage]
            key_scale = value_scale = None
            if scales_ref is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
                floats_ref, by_token = converted_ref, plgpu.Layout.WGMMA.reduce(1)
                key_scale, value_scale = (load(scale_stages_ref.at[stage, row], by_token) for row in (0, 1))
                convert(floats_ref, stages_ref.at[stage])
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))
            keys, values = (floats_ref.at[:, pl.ds(start, d)] for start in (0, d))
            logits = product(keys, query_ref, simulated) * softmax.scale
            if key_scale is not None:
                logits *= beside(key_scale, logits.shape)
            logits = softmax.capped(logits)
            visible = _seen(logits.shape, start, end, lag)
            if readers_ref is not None:
                readers = lax.broadcast(readers_ref[slot, head, first + lax.div(i, tiles)], logits.shape)
                visible &= (plgpu.layout_cast(readers, plgpu.Layout.WGMMA) >> row_of) & 1 == 1
            logits = jnp.where(visible, logits * LOG2_E, -jnp.inf)
            tile_maximum = jnp.max(logits, axis=0)
            weights = jnp.exp2(logits - below(finite(tile_maximum), logits.shape))
            tile_total = jnp.sum(weights, axis=0)
            lse = (finite(tile_maximum) + jnp.log2(tile_total)) / LOG2_E
            store(lse_ref.at[slot, head, number, i], lse)

            if value_scale is not None:
                weights = jnp.where(visible, weights * beside(value_scale, weights.shape), 0.0)  # 0 * NaN is NaN
            store(weights_ref.transpose((1, 0)), weights.astype(jnp.bfloat16))
            if scales_ref is None:
                _zero_unseen(values, start, end, [end - each for each in behind], softmax.window)
            plgpu.commit_smem()  # wgmma must see the store
            update = product(values.transpose((1, 0)), weights_ref, simulated)
            if scales_ref is None:
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))

            new_maximum = jnp.maximum(maximum, tile_maximum)
            decay = jnp.exp2(maximum - finite(new_maximum))
            tile_weight = jnp.exp2(tile_maximum - finite(new_maximum))
            mixed = mixed * below(decay, mixed.shape) + update * below(tile_weight, mixed.shape)
            return new_maximum, total * decay + tile_total * tile_weight, mixed

        nothing = (
            plgpu.layout_cast(jnp.full((num_columns,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((num_columns,), jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((d, num_columns), jnp.float32), plgpu.Layout.WGMMA),
        )
        maximum, total, mixed = lax.fori_loop(0, count * tiles, meet, nothing)
        store(maximum_ref.at[slot, head, number], maximum)
        store(total_ref.at[slot, head, number], total)
        store(mixed_ref.at[slot, head, number], mixed)


def _rows_of_columns(shape: tuple[int, int], behind: list, queries: int) -> tuple[Any, Any]:
    """Return the row of each column's query, and by how many tokens that row ends before the longest."""
    if len(behind) == 1:
        return 0, 0
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    row_of, lag = jnp.zeros_like(column), jnp.zeros_like(column) + behind[0]
    for row in range(1, len(behind)):
        here = column >= row * queries
        row_of, lag = jnp.where(here, row, row_of), jnp.where(here, behind[row], lag)
    return row_of, lag


def _seen(shape: tuple[int, int], begin, end, lag=0):
    """Return the mask of rows whose tokens have offsets in [begin, end) of their tile, each bound less the lag."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + lag
    return (offset >= begin) & (offset < end)


def _zero_unseen(values, begin, end, ends: list, window: int | None) -> None:
    """Set the values of tokens at or past all rows' ends to 0, because 0 * NaN is NaN.

    Few tiles have such tokens: the longest row attends to all that begin at `begin` and end at `end`.
    """

    @pl.when((begin > 0) | (end < TILE))
    def _():
        seen = [_seen(values.shape, 0 if window is None else each - window, each) for each in ends]
        seen = functools.reduce(operator.or_, seen)
        store(values, jnp.where(seen, values[...], jnp.zeros((), values.dtype)))

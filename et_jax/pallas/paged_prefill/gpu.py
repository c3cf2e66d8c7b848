"""`paged_prefill` for Hopper GPUs (compute capability 9.0), in Mosaic GPU.

A program processes one KV head of one row and a block of query rows: the queries that share the head, position by
position. It has three warpgroups. The producer keeps several tiles of 64 tokens in flight: those of the listed
blocks or, without lists, from the first in a window to the last that any query attends to. Each of two consumers
multiplies every tile with 64 query rows:

    scores "r s" = queries "r d" @ keys "s d" transposed        from shared memory
    mixed "r d" += weights "r s" @ values "s d"                 weights from registers

A tile of 8 bits is first converted to bfloat16 in shared memory, by the consumers in turn, which frees its stage;
the scales of its tokens, copied beside it, multiply logits and weights.

On a GPU the products are wgmma instructions; interpret mode uses plain products. Source:
FlashAttention-3 (Shah et al. 2024), without its overlap of one tile's softmax with the next tile's product.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Int8

from et_jax.pallas import hopper, tuned
from et_jax.pallas.checks import EIGHT_BITS, require_counts
from et_jax.pallas.hopper import LAYOUT, LOG2_E, TILE, below, beside, convert, load, product, store
from et_jax.softmax import Softmax, finite

ROWS = 64  # query rows per consumer: the rows of one wgmma
STEP = 64  # columns that LAYOUT places side by side
CONSUMERS = 2
PRODUCER = CONSUMERS  # the warpgroup after them
SMALL = 4 * 1024  # bytes of shared memory for barriers and the compiler, at most
ENOUGH = 4  # stages: more in flight hide no more latency
# Registers per thread: a consumer's sums need more than its third of the file, a producer almost none.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How many tiles are in flight. stages: tiles in shared memory."""

    stages: int

    def __post_init__(self) -> None:
        require_counts(self)


def heuristic(width: int, dtype: DTypeLike = jnp.bfloat16) -> Config:
    """Return the settings for a token's width in columns and the pool's dtype: as many stages as fit, up to `ENOUGH`.

    Shared memory also contains the queries, and a tile of 8 bits in bfloat16.
    """
    queries = CONSUMERS * hopper.tile_bytes(width) // 2
    converted = hopper.tile_bytes(width) if jnp.dtype(dtype) in EIGHT_BITS else 0
    left = hopper.SHARED - queries - converted - SMALL
    return Config(stages=min(ENOUGH, left // hopper.tile_bytes(width, dtype)))


def paged_prefill(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    starts: Int[Array, " b"],
    *,
    blocks: Int[Array, "b k m"] | None = None,
    counts: Int[Array, "b k"] | None = None,
    block_lse: bool = False,
    softmax: Softmax,
    kv_scales: Float[Array, "k p 2 s"] | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t h m"] | None]:
    """Return what `api.paged_prefill` documents, with None for block sums that are not requested.

    interpret: run the kernel on a CPU, simulated with these settings; None compiles it for a GPU.
    Raises NotImplementedError, with the reason and a backend that works, for what the kernel does not support.
    """
    b, t, h, d = q.shape
    k, _, s, e = pages.shape
    group = h // k
    m = page_table.shape[1] if blocks is None else blocks.shape[2]
    hopper.refuse_unsupported(q, pages)
    if config is None:
        facts = {"page_size": s, "head_dim": d, "queries": group, "chunk": t, "dtype": pages.dtype}
        config = tuned.settings(heuristic(e, pages.dtype), "paged_prefill/gpu", **facts)
        # row r of a KV head is query r % group at position start + r // group
    num_blocks = -(-t * group // (CONSUMERS * ROWS))
    num_rows = num_blocks * CONSUMERS * ROWS
    query = q.reshape(b, t, k, group, d).swapaxes(1, 2).reshape(b, k, t * group, d)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, num_rows - t * group), (0, 0)))
    if softmax.sink_logits is None:
        sinks = jnp.full((k, num_rows), -jnp.inf, jnp.float32)
    else:
        sinks = softmax.sink_logits.astype(jnp.float32).reshape(k, group) * LOG2_E
        sinks = jnp.tile(sinks, (1, -(-num_rows // group)))[:, :num_rows]
    if counts is not None:
        counts = jnp.minimum(counts, m)
    tile_sums = jax.ShapeDtypeStruct((b, k, m * (s // TILE), num_rows), jnp.float32) if block_lse else None
    settings = {"config": config, "softmax": softmax.without_sinks}
    scaled = kv_scales is not None
    layout = hopper.LAYOUT_8_BITS if scaled else LAYOUT
    out, tile_lse = plgpu.kernel(
        functools.partial(_attend_block, group=group, num_queries=t, simulated=interpret is not None, **settings),
        out_type=(jax.ShapeDtypeStruct(query.shape, jnp.bfloat16), tile_sums),
        scratch_types=(
            plgpu.SMEM((CONSUMERS, ROWS, d), jnp.bfloat16, transforms=LAYOUT),
            plgpu.SMEM((config.stages, TILE, e), pages.dtype, transforms=layout),
            plgpu.SMEM((config.stages, 2, TILE), jnp.float32) if scaled else None,
            plgpu.SMEM((TILE, e), jnp.bfloat16, transforms=LAYOUT) if scaled else None,
            plgpu.Barrier(num_barriers=CONSUMERS),
            plgpu.Barrier(num_barriers=config.stages, num_arrivals=2 if scaled else 1),
            plgpu.Barrier(num_barriers=config.stages, num_arrivals=CONSUMERS),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ),
        grid=(num_blocks, k, b),
        grid_names=("block", "head", "row"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(query, pages, page_table, starts, sinks, blocks, counts, kv_scales)
    out = out[:, :, : t * group].reshape(b, k, t, group, d).swapaxes(1, 2).reshape(b, t, h, d)
    if tile_lse is None:
        return out, None
    tile_lse = tile_lse[..., : t * group].reshape(b, k, m, s // TILE, t, group)
    return out, _block_sums(tile_lse, _tiles_seen(starts, blocks, counts, tile_lse.shape, softmax.window))


def _tiles_seen(
    starts: Int[Array, " b"],
    blocks: Int[Array, "b k m"] | None,
    counts: Int[Array, "b k"] | None,
    shape: tuple[int, ...],
    window: int | None,
) -> Bool[Array, "b #k m tiles t"]:
    """Return which queries attend to any token of which tiles, in the shape of tile sums; no other sum is written."""
    _, _, m, tiles, t, _ = shape
    entry = jnp.arange(m, dtype=jnp.int32)
    block = entry[None, None] if blocks is None else blocks
    position = (starts[:, None] + jnp.arange(t, dtype=jnp.int32))[:, None, None, None]
    token = (block[..., None] * tiles + jnp.arange(tiles, dtype=jnp.int32))[..., None] * TILE
    seen_mask = token <= position
    if window is not None:
        seen_mask &= position - (token + TILE - 1) < window
    return seen_mask if counts is None else seen_mask & (entry < counts[..., None])[..., None, None]


def _block_sums(
    tile_lse: Float[Array, "b k m tiles t g"], seen_mask: Bool[Array, "b #k m tiles t"]
) -> Float[Array, "b t h m"]:
    """Return the log-sum-exp of each block from those of its tiles, -inf if no token is visible."""
    b, k, m, tiles, t, group = tile_lse.shape
    tile_lse = jnp.where(seen_mask[..., None], tile_lse, -jnp.inf)
    lse = functools.reduce(jnp.logaddexp, (tile_lse[:, :, :, tile] for tile in range(tiles)))
    return lse.transpose(0, 3, 1, 4, 2).reshape(b, t, k * group, m)


def _attend_block(
    # inputs, in global memory
    q_ref,
    pages_ref,
    table_ref,
    starts_ref,
    sinks_ref,
    blocks_ref,  # these two are None without lists
    counts_ref,
    scales_ref,  # None unless the pool is in 8 bits
    # outputs, in global memory
    out_ref,
    lse_ref,  # None unless block sums are requested
    # scratch, in shared memory
    query_ref,
    stages_ref,
    scale_stages_ref,  # both likewise: a tile's scales, and the tile in bfloat16
    converted_ref,
    query_arrived,
    tile_arrived,
    stage_free,
    consumers_met,
    *,
    config: Config,
    softmax: Softmax,
    group: int,
    num_queries: int,
    simulated: bool,
):
    """Compute the attention of one block of query rows. Logits have base 2 until a tile's sum is written."""
    row, head, block = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("block")
    warpgroup = lax.axis_index("warpgroup")
    d, window = query_ref.shape[2], softmax.window
    tiles = pages_ref.shape[2] // TILE
    first_row = block * (CONSUMERS * ROWS)
    first_query = starts_ref[row] + lax.div(first_row, group)
    last_query = starts_ref[row] + jnp.minimum(lax.div(first_row + CONSUMERS * ROWS - 1, group), num_queries - 1)
    if counts_ref is not None:
        begin, end = 0, counts_ref[row, head] * tiles
    else:
        begin = 0 if window is None else lax.div(jnp.maximum(first_query - window + 1, 0), TILE)
        end = jnp.minimum(lax.div(last_query, TILE) + 1, table_ref.shape[1] * tiles)

    def place(i):
        """Return the block of the i-th tile to read, and the index of the tile in it."""
        entry = lax.div(begin + i, tiles)
        return entry if blocks_ref is None else blocks_ref[row, head, entry], lax.rem(begin + i, tiles)

    @pl.when(warpgroup == PRODUCER)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        def fetch(i, _):
            stage = lax.rem(i, config.stages)
            block, tile = place(i)

            @pl.when(i >= config.stages)
            def _():
                plgpu.barrier_wait(stage_free.at[stage])

            page, share = table_ref[row, block], pl.ds(tile * TILE, TILE)
            plgpu.copy_gmem_to_smem(pages_ref.at[head, page, share], stages_ref.at[stage], tile_arrived.at[stage])
            if scales_ref is not None:
                scales = scales_ref.at[head, page, :, share]
                plgpu.copy_gmem_to_smem(scales, scale_stages_ref.at[stage], tile_arrived.at[stage])

        lax.fori_loop(0, end - begin, fetch, None)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        own_rows = pl.ds(first_row + warpgroup * ROWS, ROWS)
        own_query = query_ref.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[row, head, own_rows], own_query, query_arrived.at[warpgroup])
        plgpu.barrier_wait(query_arrived.at[warpgroup])
        own_row = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 0, layout=plgpu.Layout.WGMMA)
        position = starts_ref[row] + lax.div(first_row + warpgroup * ROWS + own_row, group)

        def wait_for_each_other():
            plgpu.barrier_arrive(consumers_met)
            plgpu.barrier_wait(consumers_met)

        def attend(i, carry):
            maximum, total, mixed = carry
            stage = lax.rem(i, config.stages)
            block, tile = place(i)
            start = (block * tiles + tile) * TILE
            more = i + config.stages < end - begin  # a tile waits for this one's stage
            plgpu.barrier_wait(tile_arrived.at[stage])
            floats_ref, key_scale, value_scale = stages_ref.at[stage], None, None
            if scales_ref is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
                floats_ref, by_token = converted_ref, plgpu.Layout.WGMMA.reduce(0)
                key_scale, value_scale = (load(scale_stages_ref.at[stage, row], by_token) for row in (0, 1))
                is_finite = jnp.abs(value_scale) < jnp.inf
                key_scale = jnp.where(is_finite, key_scale, jnp.nan)  # an invalid value makes its scale NaN
                value_scale = jnp.where(is_finite, value_scale, 0.0)
                wait_for_each_other()  # until both have finished the previous tile
                own_turn = warpgroup == lax.rem(i, CONSUMERS)
                pl.when(own_turn)(functools.partial(convert, floats_ref, stages_ref.at[stage]))
                wait_for_each_other()
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))
            keys, values = (floats_ref.at[:, pl.ds(column, d)] for column in (0, d))
            logits = product(own_query, keys, simulated) * softmax.scale
            if key_scale is not None:
                logits *= below(key_scale, logits.shape)
            logits = softmax.capped(logits)

            def mask(logits):
                if scales_ref is None:
                    logits += _fault(values, simulated)
                    wait_for_each_other()
                    pl.when(warpgroup == 0)(functools.partial(_zero_faults, values))
                    wait_for_each_other()
                token = start + plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=plgpu.Layout.WGMMA)
                seen_mask = token <= position
                if window is not None:
                    seen_mask &= position - token < window
                return jnp.where(seen_mask, logits, -jnp.inf)

            is_edge = start + TILE - 1 > first_query
            if window is not None:
                is_edge |= start <= last_query - window
            logits = lax.cond(is_edge, mask, lambda logits: logits, logits * LOG2_E)

            tile_maximum = jnp.max(logits, axis=1)
            if lse_ref is not None:  # relative to the tile's own maximum, so that a small sum is exact too
                tile_weights = jnp.exp2(logits - beside(finite(tile_maximum), logits.shape))
                lse = (finite(tile_maximum) + jnp.log2(jnp.sum(tile_weights, axis=1))) / LOG2_E
                store(lse_ref.at[row, head, begin + i, own_rows], lse)
            new_maximum = jnp.maximum(maximum, tile_maximum)
            decay = jnp.exp2(maximum - finite(new_maximum))
            weights = jnp.exp2(logits - beside(finite(new_maximum), logits.shape))
            total = total * decay + jnp.sum(weights, axis=1)
            if value_scale is not None:
                weights *= below(value_scale, weights.shape)
            mixed = _accumulate(mixed * beside(decay, mixed.shape), weights.astype(jnp.bfloat16), values, simulated)
            if scales_ref is None:
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))
            return new_maximum, total, mixed

        # a sink is one more logit without a value: the initial state of the softmax
        sink = plgpu.load(sinks_ref.at[head, own_rows], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        start = (
            sink,
            jnp.where(sink == -jnp.inf, 0.0, 1.0),
            plgpu.layout_cast(jnp.zeros((ROWS, d), jnp.float32), plgpu.Layout.WGMMA),
        )
        _, total, mixed = lax.fori_loop(0, end - begin, attend, start)
        out = mixed / beside(jnp.where(total == 0.0, 1.0, total), mixed.shape)
        store(out_ref.at[row, head, own_rows], out.astype(jnp.bfloat16))


def _accumulate(mixed, weights, values, simulated: bool):
    """Return mixed "r d" + weights "r s" @ values "s d"."""
    if simulated:
        result = mixed + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike a wgmma's, these reads must be fenced from the next copy into this buffer
        return result
    return pl.run_state(lambda sum_ref: plgpu.wgmma(sum_ref, weights, values))(plgpu.WGMMAAccumulatorRef.init(mixed))


def _fault(values, simulated: bool) -> Float[Array, "r s"]:
    """Return, in every row, NaN for a token whose value is not finite and 0 for any other: 0 * NaN is NaN."""
    if simulated:
        fault = jnp.dot(jnp.zeros((ROWS, values.shape[1]), jnp.bfloat16), values[...].T).astype(jnp.float32)
        plgpu.commit_smem()
        return fault

    def accumulate(sum_ref):
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, STEP), jnp.bfloat16), plgpu.Layout.WGMMA)
        for column in range(0, values.shape[1], STEP):
            plgpu.wgmma(sum_ref, zeros, values.at[:, pl.ds(column, STEP)].transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((ROWS, TILE), jnp.float32))


def _zero_faults(values: Any) -> None:
    """Set values that are not finite to 0: a query that does not attend to them has weight 0, and 0 * NaN is NaN."""
    for column in range(0, values.shape[1], STEP):
        share = values.at[:, pl.ds(column, STEP)]
        value = share[...]
        is_finite = jnp.abs(value.astype(jnp.float32)) < jnp.inf
        store(share, jnp.where(is_finite, value, jnp.zeros((), value.dtype)))
    plgpu.commit_smem()

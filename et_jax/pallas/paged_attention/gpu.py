"""`paged_attention` for Hopper GPUs (compute capability 9.0), in Mosaic GPU.

A program takes one KV head of one slot and one *part* of its list. Two warpgroups share it. The producer keeps
several tiles of 64 tokens in flight: one bulk copy (TMA) brings a tile's keys and values into shared memory. The
consumer meets each tile with the queries that share the head, those of every row of the slot:

    scores "s g" = keys "s d" @ queries "g d" transposed       tokens on the 64 rows that a wgmma has,
    update "d g" = values "s d" transposed @ weights "s g"     the few queries on its columns

A tile of 8 bits is first turned into bfloat16 in shared memory, which leaves its stage free at once; the scales of its
tokens, copied beside it, multiply logits and weights.

A part is a fixed number of list entries, and what the parts found is added up in a fixed order, so a row's bits
depend on its own list alone. A program past the end of its list copies nothing.

On a GPU the two products are wgmma instructions. Interpret mode has none with transposed operands: there they are
plain products, so it proves the copies, barriers, masks and sums, not the layouts that wgmma reads. Sources: splitting
the list, Flash-Decoding (Dao et al. 2023); a producer and a consumer, FlashAttention-3 (Shah et al. 2024).
"""

import dataclasses
import functools
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import hopper, tuned
from et_jax.pallas.checks import EIGHT_BITS, require_counts
from et_jax.pallas.folding import by_head, most_together, split
from et_jax.pallas.hopper import LAYOUT, LOG2_E, TILE, convert, load, product, store
from et_jax.pallas.paged_attention.gpu_sums import combined
from et_jax.pallas.paged_attention.lists import count_of, lengths_of, most_seen, seen
from et_jax.softmax import Softmax, finite

COLUMNS = 8  # the columns of a wgmma come in eights
MOST_QUERIES = 16  # of a row: each costs registers, and a share of what every part writes
MOST_COLUMNS_OF_TWO = 16  # at 24 the assembler gives a thread 158 registers, and two programs may have 128 each
MOST_VALUES = 4096  # sums that are in registers, one for each query of all rows and column of values
SMALL = 14 * 1024  # bytes of shared memory that queries, weights, barriers and the compiler's own take, at the most
DEEP = 3  # stages: one read, one arriving, one asked for
PART_TOKENS = 768  # of two bytes a number
PRODUCER, CONSUMER = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a list is cut, and how many tiles are in flight.

    part: list entries of a program, the same for every batch, count and list length.
    stages: tiles that shared memory holds.
    """

    part: int
    stages: int

    def __post_init__(self) -> None:
        require_counts(self)


def heuristic(page_size: int, group: int, width: int, dtype: DTypeLike = jnp.bfloat16) -> Config:
    """Return the settings for a page size in tokens, a query group, a token's width in columns and the pool's dtype.

    A part is as long whatever the group is, so that a row has the same bits read alone and beside others of its slot.
    It ends in float32 sums, which for eight columns of queries are 1.3% of what it reads in bfloat16, for 64 10%, and
    one list of 32k tokens is cut into 43 programs. Two programs share a multiprocessor, so that one copies while the
    other begins or ends, unless that left either with a shallow pipeline, or their registers would not be enough.
    """
    bytes_per_tile = hopper.tile_bytes(width, dtype)
    # one tile of 8 bits is turned into bfloat16
    taken = SMALL + (hopper.tile_bytes(width) if jnp.dtype(dtype) in EIGHT_BITS else 0)
    stages = (hopper.SHARED // 2 - taken) // bytes_per_tile
    if stages < DEEP or columns(group) > MOST_COLUMNS_OF_TWO:
        stages = (hopper.SHARED - taken) // bytes_per_tile
    part_tokens = PART_TOKENS * 2 // jnp.dtype(dtype).itemsize
    return Config(part=max(1, part_tokens // page_size), stages=stages)


def columns(group: int) -> int:
    """Return the query group rounded up to the columns of a wgmma."""
    return -(-group // COLUMNS) * COLUMNS


def paged_attention(
    q: Float[Array, "q h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"] | None,
    counts: Int[Array, "b k"] | None,
    lengths: Int[Array, " r"],
    *,
    softmax: Softmax,
    skipped: Int[Array, "b k"] | None = None,
    turn: Int[Array, ""] | None = None,
    depth: int = 1,
    rows_per_slot: int = 1,
    readers: Int[Array, "b k m"] | None = None,
    kv_scales: Float[Array, "k p 2 s"] | None = None,
    block_sums: bool = True,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "q h d"], Float[Array, "q h m"] | None]:
    """Return what `api.paged_attention` documents.

    interpret: run the kernel on a CPU, simulated with these settings; None compiles it for a GPU.
    Raises NotImplementedError, with the reason and the backend that can, for what the kernel does not serve.
    """
    _, h, d = q.shape
    k, _, s, e = pages.shape
    tiles = s // TILE
    hopper.refuse_unserved(q, pages)
    if h // k > MOST_QUERIES:
        raise hopper.unserved(f"has columns for {MOST_QUERIES} query heads a KV head, not {h // k}")
    rows = most_together(rows_per_slot, lambda rows: columns(rows * h // k) * d <= MOST_VALUES)
    page_table, blocks, counts, skipped, readers = split(
        rows_per_slot, rows, page_table, blocks, counts, skipped, readers=readers
    )
    m = most_seen(page_table.shape[1], s, rows_per_slot, softmax.window) if blocks is None else blocks.shape[2]
    b, group = page_table.shape[0], rows * h // k
    if config is None:
        facts = {"page_size": s, "head_dim": d, "queries": group, "dtype": pages.dtype}
        config = tuned.settings(heuristic(s, group, e, pages.dtype), "paged_attention/gpu", **facts)
    num_parts = -(-m // config.part)
    query = jnp.pad(by_head(q[: b * rows], k, rows), ((0, 0), (0, 0), (0, columns(group) - group), (0, 0)))
    inputs = {
        "q_ref": query,
        "pages_ref": pages,
        "table_ref": page_table,
        "lengths_ref": lengths,
    }
    if blocks is not None and counts is not None:
        inputs |= {"blocks_ref": blocks, "counts_ref": counts}
    if skipped is not None:
        inputs["skipped_ref"] = skipped
    if turn is not None:
        inputs["turn_ref"] = turn.reshape(1)
    sums = {
        "maximum_ref": (columns(group),),
        "total_ref": (columns(group),),
        "mixed_ref": (d, columns(group)),
        "lse_ref": (config.part * tiles, columns(group)),
    }
    scratch = {
        "query_ref": plgpu.SMEM((columns(group), d), jnp.bfloat16, transforms=LAYOUT),
        "stages_ref": plgpu.SMEM((config.stages, TILE, e), jnp.bfloat16, transforms=LAYOUT),
        "weights_ref": plgpu.SMEM((columns(group), TILE), jnp.bfloat16, transforms=LAYOUT),
        "query_arrived": plgpu.Barrier(),
        "tile_arrived": plgpu.Barrier(num_barriers=config.stages),
        "stage_free": plgpu.Barrier(num_barriers=config.stages),
    }
    if kv_scales is not None:
        inputs["scales_ref"] = kv_scales
        scratch["stages_ref"] = plgpu.SMEM((config.stages, TILE, e), pages.dtype, transforms=hopper.LAYOUT_8_BITS)
        scratch["scale_stages_ref"] = plgpu.SMEM((config.stages, 2, TILE), jnp.float32)
        scratch["converted_ref"] = plgpu.SMEM((TILE, e), jnp.bfloat16, transforms=LAYOUT)
        scratch["tile_arrived"] = plgpu.Barrier(num_barriers=config.stages, num_arrivals=2)
    if readers is not None:
        inputs["readers_ref"] = readers
    settings = {"config": config, "softmax": softmax.without_sinks, "rows": rows, "queries": h // k}
    settings |= {"rows_per_slot": rows_per_slot, "depth": depth}

    def attend_part(*refs: Any, **scratch_refs: Any) -> None:
        _attend_part(
            **dict(zip((*inputs, *sums), refs, strict=True)),
            **scratch_refs,
            **settings,
            simulated=interpret is not None,
        )

    maximum, total, mixed, lse = plgpu.kernel(
        attend_part,
        out_type=[jax.ShapeDtypeStruct((b, k, num_parts, *shape), jnp.float32) for shape in sums.values()],
        scratch_types=scratch,
        grid=(num_parts, k, b),
        grid_names=("part", "head", "slot"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(*inputs.values())

    out, *block_lse = combined(
        maximum,
        total,
        mixed,
        lse.reshape(b, k, num_parts * config.part, tiles, -1) if block_sums else None,
        (lengths, counts, skipped),
        softmax.sink_logits,
        counted=partial(count_of, page_size=s, window=softmax.window, rows=rows, rows_per_slot=rows_per_slot, most=m),
        part=config.part,
        m=m,
        rows=rows,
        queries=h // k,
        dtype=q.dtype,
        num_rows=len(q),
        interpret=interpret is not None,
    )
    if not block_lse:
        return out, None
    past = [(0, len(q) - len(block_lse[0])), (0, 0), (0, 0)]
    return out, jnp.pad(block_lse[0], past, constant_values=-jnp.inf)


def _attend_part(
    *,
    # inputs, in global memory
    q_ref: Any,
    pages_ref: Any,
    table_ref: Any,
    lengths_ref: Any,
    blocks_ref: Any = None,  # these two where there are lists
    counts_ref: Any = None,
    skipped_ref: Any = None,  # where there are none, and KV heads leave out what is at the beginning
    turn_ref: Any = None,  # of a pool of several layers
    scales_ref: Any = None,  # of a pool in 8 bits
    readers_ref: Any = None,  # where some rows read more of the list than others
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
    scale_stages_ref: Any = None,  # these two of a pool in 8 bits: a tile's scales, and it in bfloat16
    converted_ref: Any = None,
    # settings
    config: Config,
    softmax: Softmax,
    rows: int,
    queries: int,
    rows_per_slot: int,
    depth: int,
    simulated: bool,
) -> None:
    """Attend to one part of one list, for so many rows of so many queries each.

    Logits have base 2 until a tile's sum is written.
    """
    slot, head, part = lax.axis_index("slot"), lax.axis_index("head"), lax.axis_index("part")
    warpgroup = lax.axis_index("warpgroup")
    first = part * config.part
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
    count = jnp.clip(count - first, 0, config.part)
    base = 0 if turn_ref is None else turn_ref[0] * (num_pages // depth)

    def listed(i: Any) -> Any:
        """The block of the part's tile i."""
        entry = first + lax.div(i, tiles)
        return begin + entry if blocks_ref is None else blocks_ref[slot, head, entry]

    @pl.when((warpgroup == PRODUCER) & (count > 0))
    def _():
        def fetch(i, _):
            stage, tile = lax.rem(i, config.stages), lax.rem(i, tiles)
            page = base + table_ref[slot, listed(i)]

            @pl.when(i >= config.stages)
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
            stage, tile = lax.rem(i, config.stages), lax.rem(i, tiles)
            end = length - listed(i) * page_size - tile * TILE
            start = 0 if softmax.window is None else end - softmax.window
            more = i + config.stages < count * tiles  # a tile waits for this one's stage
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
                logits *= _beside(key_scale, logits.shape)
            logits = softmax.capped(logits)
            visible = _seen(logits.shape, start, end, lag)
            if readers_ref is not None:
                readers = lax.broadcast(readers_ref[slot, head, first + lax.div(i, tiles)], logits.shape)
                visible &= (plgpu.layout_cast(readers, plgpu.Layout.WGMMA) >> row_of) & 1 == 1
            logits = jnp.where(visible, logits * LOG2_E, -jnp.inf)
            tile_maximum = jnp.max(logits, axis=0)
            weights = jnp.exp2(logits - _below(finite(tile_maximum), logits.shape))
            tile_total = jnp.sum(weights, axis=0)
            lse = (finite(tile_maximum) + jnp.log2(tile_total)) / LOG2_E
            store(lse_ref.at[slot, head, part, i], lse)

            if value_scale is not None:
                weights = jnp.where(visible, weights * _beside(value_scale, weights.shape), 0.0)  # 0 * NaN is NaN
            store(weights_ref.transpose((1, 0)), weights.astype(jnp.bfloat16))
            if scales_ref is None:
                _zero_unseen(values, start, end, [end - each for each in behind], softmax.window)
            plgpu.commit_smem()  # wgmma must see what was stored
            update = product(values.transpose((1, 0)), weights_ref, simulated)
            if scales_ref is None:
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))

            new_maximum = jnp.maximum(maximum, tile_maximum)
            decay = jnp.exp2(maximum - finite(new_maximum))
            tile_weight = jnp.exp2(tile_maximum - finite(new_maximum))
            mixed = mixed * _below(decay, mixed.shape) + update * _below(tile_weight, mixed.shape)
            return new_maximum, total * decay + tile_total * tile_weight, mixed

        nothing = (
            plgpu.layout_cast(jnp.full((num_columns,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((num_columns,), jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((d, num_columns), jnp.float32), plgpu.Layout.WGMMA),
        )
        maximum, total, mixed = lax.fori_loop(0, count * tiles, meet, nothing)
        store(maximum_ref.at[slot, head, part], maximum)
        store(total_ref.at[slot, head, part], total)
        store(mixed_ref.at[slot, head, part], mixed)


def _rows_of_columns(shape: tuple[int, int], behind: list, queries: int) -> tuple[Any, Any]:
    """Return the row that each column's query is of, and by how many tokens that row ends before the longest."""
    if len(behind) == 1:
        return 0, 0
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    row_of, lag = jnp.zeros_like(column), jnp.zeros_like(column) + behind[0]
    for row in range(1, len(behind)):
        here = column >= row * queries
        row_of, lag = jnp.where(here, row, row_of), jnp.where(here, behind[row], lag)
    return row_of, lag


def _seen(shape: tuple[int, int], begin, end, lag=0):
    """Return which rows stand for tokens at offsets [begin, end) of their tile, each bound less the lag."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + lag
    return (offset >= begin) & (offset < end)


def _zero_unseen(values, begin, end, ends: list, window: int | None) -> None:
    """Put 0 for the values of tokens that no row sees, each those before its end: 0 * NaN is NaN.

    Few tiles have such tokens: the longest row sees all that begin at `begin` and end at `end`.
    """

    @pl.when((begin > 0) | (end < TILE))
    def _():
        seen = [_seen(values.shape, 0 if window is None else each - window, each) for each in ends]
        seen = functools.reduce(operator.or_, seen)
        store(values, jnp.where(seen, values[...], jnp.zeros((), values.dtype)))


def _below(row: Float[Array, " g"], shape: tuple[int, int]) -> Float[Array, "x g"]:
    """Return the row repeated below itself."""
    return lax.broadcast_in_dim(row, shape, [1])


def _beside(column: Float[Array, " s"], shape: tuple[int, int]) -> Float[Array, "s x"]:
    """Return the column repeated beside itself."""
    return lax.broadcast_in_dim(column, shape, [0])

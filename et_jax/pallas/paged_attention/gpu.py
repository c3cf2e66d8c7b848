"""`paged_attention` for Hopper GPUs (compute capability 9.0), in Mosaic GPU.

A program processes one KV head of one slot and one *part* of its list, with two warpgroups. The producer keeps
several tiles of 64 tokens in flight: one bulk copy (TMA) brings a tile's keys and values into shared memory. The
consumer multiplies each tile with the queries that share the head, those of every row of the slot:

    scores "s g" = keys "s d" @ queries "g d" transposed       tokens on the 64 rows of a wgmma,
    update "d g" = values "s d" transposed @ weights "s g"     the few queries on its columns

A tile of 8 bits is first converted to bfloat16 in shared memory, which frees its stage at once; the scales of its
tokens, copied beside it, multiply logits and weights.

A part is a fixed number of list entries, and the results of the parts are added in a fixed order, so a row's bits
depend only on its own list. A program past the end of its list copies nothing.

On a GPU the two products are wgmma instructions. Interpret mode has none with transposed operands: there they are
plain products, so it tests the copies, barriers, masks and sums, not the layouts that wgmma reads. Sources: splitting
the list, Flash-Decoding (Dao et al. 2023); a producer and a consumer, FlashAttention-3 (Shah et al. 2024).
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import hopper, tuned
from et_jax.pallas.checks import EIGHT_BITS, require, require_counts
from et_jax.pallas.folding import by_head, most_together, split
from et_jax.pallas.hopper import LAYOUT, TILE
from et_jax.pallas.paged_attention import gpu_part
from et_jax.pallas.paged_attention.gpu_sums import combined
from et_jax.pallas.paged_attention.lists import count_of, most_seen
from et_jax.softmax import Softmax

COLUMNS = 8  # wgmma columns are a multiple of eight
MOST_QUERIES = 16  # per row: each costs registers, and a share of the output of every part
MOST_COLUMNS_OF_TWO = 16  # at 24 the assembler needs 158 registers per thread, and two programs may have 128 each
MOST_VALUES = 4096  # sums in registers, one for each query of all rows and column of values
SMALL = 14 * 1024  # bytes of shared memory for queries, weights, barriers and the compiler, at most
DEEP = 3  # stages: one being read, one arriving, one requested
PART_TOKENS = 768  # at two bytes per number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a list is split, and how many tiles are in flight.

    part: list entries per program, the same for every batch, count and list length.
    stages: tiles in shared memory.
    """

    part: int
    stages: int

    def __post_init__(self) -> None:
        require_counts(self)


def heuristic(page_size: int, group: int, width: int, dtype: DTypeLike = jnp.bfloat16) -> Config:
    """Return the settings for a page size in tokens, a query group, a token's width in columns and the pool's dtype.

    The part length does not depend on the group, so a row's bits are the same alone and beside others of its slot.
    A part ends in float32 sums: for eight columns of queries they are 1.3% of the bytes read in bfloat16, for 64 10%,
    and one list of 32k tokens has 43 parts. Two programs share a multiprocessor, so that one copies while the
    other begins or ends, unless the pipeline would be too shallow or the registers insufficient.
    """
    bytes_per_tile = hopper.tile_bytes(width, dtype)
    # one tile of 8 bits is converted to bfloat16
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
    q: Float[Array, "q c d"],
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
    num_heads: int | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "q h d"], Float[Array, "q h m"] | None]:
    """Return what `api.paged_attention` documents.

    interpret: run the kernel on a CPU, simulated with these settings; None compiles it for a GPU.
    Raises NotImplementedError, with the reason and a backend that works, for what the kernel does not support.
    """
    _, c, d = q.shape
    h = num_heads or c
    k, _, s, e = pages.shape
    tiles = s // TILE
    hopper.refuse_unsupported(q, pages)
    if h // k > MOST_QUERIES:
        raise hopper.unsupported(f"has columns for {MOST_QUERIES} query heads a KV head, not {h // k}")
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
    if h < c:
        require(
            rows_per_slot == 1 and c == k * columns(group), "q", f"{c} heads", f"{h}, or padded ones of single rows"
        )
        query = q.reshape(-1, k, c // k, d)
    else:
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
    settings = {
        "part": config.part,
        "stages": config.stages,
        "softmax": softmax.without_sinks,
        "rows": rows,
        "queries": h // k,
    }
    settings |= {"rows_per_slot": rows_per_slot, "depth": depth}

    def attend_part(*refs: Any, **scratch_refs: Any) -> None:
        gpu_part.attend_part(
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

"""`paged_attention` for Hopper GPUs (compute capability 9.0), in Mosaic GPU.

A program takes one KV head of one row and one *part* of its list. Two warpgroups share it. The producer keeps
several tiles of 64 tokens in flight: one bulk copy (TMA) brings a tile's keys and values into shared memory. The
consumer meets each tile with the queries that share the head:

    scores "s g" = keys "s d" @ queries "g d" transposed       tokens on the 64 rows that a wgmma has,
    update "d g" = values "s d" transposed @ weights "s g"     the few queries on its columns

A tile of 8-bit integers is first turned into bfloat16 in shared memory, which leaves its stage free at once.

A part is a fixed number of list entries, and what the parts found is added up in a fixed order, so a row's bits
depend on its own list alone. A program past the end of its list copies nothing.

On a GPU the two products are wgmma instructions. Interpret mode has none with transposed operands: there they are
plain products, so it proves the copies, barriers, masks and sums, not the layouts that wgmma reads. Sources: splitting
the list, Flash-Decoding (Dao et al. 2023); a producer and a consumer, FlashAttention-3 (Shah et al. 2024).
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
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import hopper, tuned
from et_jax.pallas.checks import require_counts
from et_jax.pallas.gather import listed_scales
from et_jax.pallas.hopper import LAYOUT, LOG2_E, TILE, load, product, store
from et_jax.pallas.softmax import Softmax, finite

COLUMNS = 8  # the columns of a wgmma come in eights
MOST_QUERIES = 16  # a KV head: each costs registers, and a share of what every part writes
SMALL = 14 * 1024  # bytes of shared memory that queries, weights, barriers and the compiler's own take, at the most
DEEP = 3  # stages: one read, one arriving, one asked for
PART_TOKENS = 1536
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

    A part ends in 8 float32 sums for each column of values: 1536 tokens of bfloat16 keep these under 1% of what
    is read (of 8-bit integers twice the tokens), and still cut one list of 32k tokens into 21 programs. Two programs
    share a multiprocessor, so that one copies while the other begins or ends, unless that left either with a shallow
    pipeline.
    """
    bytes_per_tile = hopper.tile_bytes(width, dtype)
    taken = SMALL + (hopper.tile_bytes(width) if dtype == jnp.int8 else 0)  # one tile is turned into bfloat16
    stages = (hopper.SHARED // 2 - taken) // bytes_per_tile
    if stages < DEEP:
        stages = (hopper.SHARED - taken) // bytes_per_tile
    part_tokens = PART_TOKENS * columns(group) // COLUMNS * (2 // jnp.dtype(dtype).itemsize)
    return Config(part=part_tokens // page_size, stages=stages)


def columns(group: int) -> int:
    """Return the query group rounded up to the columns of a wgmma."""
    return -(-group // COLUMNS) * COLUMNS


def paged_attention(
    q: Float[Array, "b h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"],
    counts: Int[Array, "b k"],
    lengths: Int[Array, " b"],
    *,
    softmax: Softmax,
    kv_scales: Float[Array, "k p 2"] | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "b h d"], Float[Array, "b h m"]]:
    """Return what `api.paged_attention` documents.

    interpret: run the kernel on a CPU, simulated with these settings; None compiles it for a GPU.
    Raises NotImplementedError, with the reason and the backend that can, for what the kernel does not serve.
    """
    b, h, d = q.shape
    k, _, s, e = pages.shape
    m, group, tiles = blocks.shape[2], h // k, s // TILE
    hopper.refuse_unserved(q, pages, int8=True)
    if group > MOST_QUERIES:
        raise hopper.unserved(f"has columns for {MOST_QUERIES} query heads a KV head, not {group}")
    if config is None:
        facts = {"page_size": s, "head_dim": d, "queries": group, "dtype": pages.dtype}
        config = tuned.settings(heuristic(s, group, e, pages.dtype), "paged_attention/gpu", **facts)
    num_parts = -(-m // config.part)
    counts = jnp.minimum(counts, m)
    query = jnp.pad(q.reshape(b, k, group, d), ((0, 0), (0, 0), (0, columns(group) - group), (0, 0)))
    settings = {"config": config, "softmax": softmax.without_sinks}
    scales, staged, layout, converted = [], jnp.bfloat16, LAYOUT, []
    if kv_scales is not None:
        scales, staged, layout = [listed_scales(kv_scales, page_table, blocks, counts)], jnp.int8, hopper.LAYOUT_INT8
        converted = [plgpu.SMEM((TILE, e), jnp.bfloat16, transforms=LAYOUT)]
    maximum, total, mixed, lse = plgpu.kernel(
        functools.partial(_attend_part if scales else _attend_floats, simulated=interpret is not None, **settings),
        out_type=(
            jax.ShapeDtypeStruct((b, k, num_parts, columns(group)), jnp.float32),
            jax.ShapeDtypeStruct((b, k, num_parts, columns(group)), jnp.float32),
            jax.ShapeDtypeStruct((b, k, num_parts, d, columns(group)), jnp.float32),
            jax.ShapeDtypeStruct((b, k, num_parts, config.part * tiles, columns(group)), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((columns(group), d), jnp.bfloat16, transforms=LAYOUT),
            plgpu.SMEM((config.stages, TILE, e), staged, transforms=layout),
            plgpu.SMEM((columns(group), TILE), jnp.bfloat16, transforms=LAYOUT),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_barriers=config.stages),
            *converted,
        ),
        grid=(num_parts, k, b),
        grid_names=("part", "head", "row"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(*scales, query, pages, page_table, blocks, counts, lengths)

    sinks = softmax.sink_logits
    # parts past the end of a list were never written
    used_mask = (jnp.arange(num_parts) * config.part < counts[..., None])[..., None]
    out = _combine(
        jnp.where(used_mask, maximum[..., :group], -jnp.inf),
        jnp.where(used_mask, total[..., :group], 0.0),
        jnp.where(used_mask[..., None], mixed[..., :group], 0.0),
        None if sinks is None else sinks.astype(jnp.float32).reshape(k, group) * LOG2_E,
    )
    listed_mask = jnp.arange(m) < counts[..., None]
    tile_lse = lse.reshape(b, k, num_parts * config.part, tiles, -1)[:, :, :m, :, :group]
    tile_lse = jnp.where(listed_mask[..., None, None], tile_lse, -jnp.inf)
    block_lse = functools.reduce(jnp.logaddexp, (tile_lse[:, :, :, tile] for tile in range(tiles)))
    return out.swapaxes(2, 3).reshape(b, h, d).astype(q.dtype), block_lse.swapaxes(2, 3).reshape(b, h, m)


def _attend_floats(*refs, **settings):
    """Attend to one part of one list, whose tokens need no scales and are multiplied where they arrive."""
    every: tuple[Any, ...] = (None, *refs, None)
    _attend_part(*every, **settings)


def _attend_part(
    # inputs, in global memory
    scales_ref,
    q_ref,
    pages_ref,
    table_ref,
    blocks_ref,
    counts_ref,
    lengths_ref,
    # outputs, in global memory
    maximum_ref,
    total_ref,
    mixed_ref,
    lse_ref,
    # scratch, in shared memory
    query_ref,
    stages_ref,
    weights_ref,
    query_arrived,
    tile_arrived,
    stage_free,
    converted_ref,
    *,
    config: Config,
    softmax: Softmax,
    simulated: bool,
):
    """Attend to one part of one list. Logits have base 2 until a tile's sum is written."""
    row, head, part = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("part")
    warpgroup = lax.axis_index("warpgroup")
    first = part * config.part
    count = jnp.clip(counts_ref[row, head] - first, 0, config.part)
    num_columns, d = query_ref.shape
    page_size = pages_ref.shape[2]
    tiles = page_size // TILE

    @pl.when((warpgroup == PRODUCER) & (count > 0))
    def _():
        def fetch(i, _):
            stage, tile = lax.rem(i, config.stages), lax.rem(i, tiles)
            page = table_ref[row, blocks_ref[row, head, first + lax.div(i, tiles)]]

            @pl.when(i >= config.stages)
            def _():
                plgpu.barrier_wait(stage_free.at[stage])

            tokens = pages_ref.at[head, page, pl.ds(tile * TILE, TILE)]
            plgpu.copy_gmem_to_smem(tokens, stages_ref.at[stage], tile_arrived.at[stage])

        lax.fori_loop(0, count * tiles, fetch, None)

    @pl.when((warpgroup == CONSUMER) & (count > 0))
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], query_ref, query_arrived)
        length = lengths_ref[row]
        plgpu.barrier_wait(query_arrived)

        def meet(i, carry):
            maximum, total, mixed = carry
            stage, tile = lax.rem(i, config.stages), lax.rem(i, tiles)
            end = length - blocks_ref[row, head, first + lax.div(i, tiles)] * page_size - tile * TILE
            begin = 0 if softmax.window is None else end - softmax.window
            more = i + config.stages < count * tiles  # a tile waits for this one's stage
            plgpu.barrier_wait(tile_arrived.at[stage])
            floats_ref = stages_ref.at[stage]
            key_scale, value_scale = softmax.scale, None
            if scales_ref is not None:  # 8-bit integers are exact in bfloat16: the sums are scaled, not the tokens
                floats_ref, entry = converted_ref, first + lax.div(i, tiles)
                store(floats_ref, load(stages_ref.at[stage]).astype(jnp.bfloat16))
                plgpu.commit_smem()
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))
                key_scale = softmax.scale * scales_ref[row, head, 0, entry]
                value_scale = scales_ref[row, head, 1, entry]
            keys, values = (floats_ref.at[:, pl.ds(start, d)] for start in (0, d))
            logits = softmax.capped(product(keys, query_ref, simulated) * key_scale)
            logits = jnp.where(_seen(logits.shape, begin, end), logits * LOG2_E, -jnp.inf)
            tile_maximum = jnp.max(logits, axis=0)
            weights = jnp.exp2(logits - _below(finite(tile_maximum), logits.shape))
            tile_total = jnp.sum(weights, axis=0)
            lse = (finite(tile_maximum) + jnp.log2(tile_total)) / LOG2_E
            store(lse_ref.at[row, head, part, i], lse)

            store(weights_ref.transpose((1, 0)), weights.astype(jnp.bfloat16))
            if scales_ref is None:
                _zero_unseen(values, begin, end)
            plgpu.commit_smem()  # wgmma must see what was stored
            update = product(values.transpose((1, 0)), weights_ref, simulated)
            if scales_ref is None:
                pl.when(more)(lambda: plgpu.barrier_arrive(stage_free.at[stage]))

            new_maximum = jnp.maximum(maximum, tile_maximum)
            decay = jnp.exp2(maximum - finite(new_maximum))
            tile_weight = jnp.exp2(tile_maximum - finite(new_maximum))
            update_weight = tile_weight if value_scale is None else tile_weight * value_scale
            mixed = mixed * _below(decay, mixed.shape) + update * _below(update_weight, mixed.shape)
            return new_maximum, total * decay + tile_total * tile_weight, mixed

        start = (
            plgpu.layout_cast(jnp.full((num_columns,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((num_columns,), jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((d, num_columns), jnp.float32), plgpu.Layout.WGMMA),
        )
        maximum, total, mixed = lax.fori_loop(0, count * tiles, meet, start)
        store(maximum_ref.at[row, head, part], maximum)
        store(total_ref.at[row, head, part], total)
        store(mixed_ref.at[row, head, part], mixed)


def _seen(shape: tuple[int, int], begin, end):
    """Return which rows stand for tokens at offsets [begin, end) of their tile."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    return (offset >= begin) & (offset < end)


def _zero_unseen(values, begin, end) -> None:
    """Put 0 for the values of tokens outside [begin, end): 0 * NaN is NaN. Few tiles have such tokens."""

    @pl.when((begin > 0) | (end < TILE))
    def _():
        seen = jnp.where(_seen(values.shape, begin, end), values[...], jnp.zeros((), values.dtype))
        store(values, seen)


def _below(row: Float[Array, " g"], shape: tuple[int, int]) -> Float[Array, "x g"]:
    """Return the row repeated below itself."""
    return lax.broadcast_in_dim(row, shape, [1])


def _combine(
    maximum: Float[Array, "b k n g"],
    total: Float[Array, "b k n g"],
    mixed: Float[Array, "b k n d g"],
    sink: Float[Array, "k g"] | None,
) -> Float[Array, "b k d g"]:
    """Return attention from its n parts, each relative to its own maximum; logits have base 2."""
    top = jnp.max(maximum, axis=2)
    if sink is not None:
        top = jnp.maximum(top, sink)
    weight = jnp.exp2(maximum - finite(top)[:, :, None])
    denominator = _sum_in_pairs(total * weight)
    if sink is not None:
        denominator += jnp.exp2(sink - top)
    denominator = jnp.where(denominator == 0.0, 1.0, denominator)
    return _sum_in_pairs(mixed * weight[:, :, :, None]) / denominator[:, :, None]


def _sum_in_pairs(x: Float[Array, "b k n *rest"]) -> Float[Array, "b k *rest"]:
    """Return the sum over the parts, neighbour by neighbour: parts of 0 at the end change no bit."""
    while x.shape[2] > 1:
        odd = [(0, x.shape[2] % 2 if axis == 2 else 0) for axis in range(x.ndim)]
        x = jnp.pad(x, odd)
        x = x[:, :, 0::2] + x[:, :, 1::2]
    return x[:, :, 0]

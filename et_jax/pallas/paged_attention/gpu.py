"""`paged_attention` for Hopper GPUs (compute capability 9.0), in Mosaic GPU.

A program takes one KV head of one row and one *part* of its list. Two warpgroups share it. The producer keeps
several pages in flight: one bulk copy (TMA) brings the keys and values of a page into shared memory. The consumer
meets each page with the queries that share the head:

    scores "s g" = keys "s d" @ queries "g d" transposed       tokens on the 64 rows that a wgmma has,
    update "d g" = values "s d" transposed @ weights "s g"     the few queries on its columns

A part is a fixed number of list entries, and what the parts found is added up in a fixed order, so a row's bits
depend on its own list alone. A program past the end of its list copies nothing.

On a GPU the two products are wgmma instructions. Interpret mode has none with transposed operands: there they are
plain products, so it proves the copies, barriers, masks and sums, not the layouts that wgmma reads. Sources: splitting
the list, Flash-Decoding (Dao et al. 2023); a producer and a consumer, FlashAttention-3 (Shah et al. 2024).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

LOG2_E = math.log2(math.e)  # the hardware's exponential has base 2
TILES = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # what wgmma reads bfloat16 from, spared of
ROWS = 64  # bank conflicts; the rows of one wgmma
COLUMNS = 8  # the columns of a wgmma come in eights
PAGE_SIZES = (64, 128)  # wgmma sums over 64 tokens at a time; a bulk copy brings at most 256
HEAD_DIMS = (64, 128, 256)  # whole tiles, so that a value starts on a tile's border
MOST_QUERIES = 16  # a KV head: each costs an accumulator column, a score row and a share of every part's result
MOST_SHARED = 227 * 1024  # bytes of shared memory a program can have
SMALL_SHARED = 16 * 1024  # of which queries, weights and barriers take less than this
FEWEST_STAGES = 2  # one page read while the next arrives
PART_TOKENS = 1024
PRODUCER, CONSUMER = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How a list is cut, and how many pages are in flight.

    part: list entries of a program, the same for every batch, count and list length.
    stages: pages that shared memory holds.
    """

    part: int
    stages: int


def heuristic(page_size: int, group: int, width: int) -> Config:
    """Return the settings for a page size in tokens, a query group and a token's width in columns.

    A part ends in `columns` float32 sums for each of its `tokens` bfloat16 values: 1024 tokens for 8 columns keep
    the sums under 1% of what is read, and cut short lists finely enough to fill the chip. Pages in flight take
    half the shared memory, so that two programs share a multiprocessor, and one copies while the other computes.
    """
    part = PART_TOKENS * columns(group) // COLUMNS // page_size
    stages = (MOST_SHARED // 2 - SMALL_SHARED) // page_bytes(page_size, width)
    return Config(part=part, stages=max(FEWEST_STAGES, stages))


def columns(group: int) -> int:
    """Return the query group rounded up to the columns of a wgmma."""
    return -(-group // COLUMNS) * COLUMNS


def page_bytes(page_size: int, width: int) -> int:
    """Return the bytes of one bfloat16 page of one KV head."""
    return page_size * width * jnp.dtype(jnp.bfloat16).itemsize


def paged_attention(
    q: Float[Array, "b h d"],
    pages: Float[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"],
    counts: Int[Array, "b k"],
    lengths: Int[Array, " b"],
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sink_logits: Float[Array, " h"] | None = None,
    config: Config | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "b h d"], Float[Array, "b h m"]]:
    """Return what `api.paged_attention` documents.

    interpret: run the kernel on a CPU, simulated with these settings; None compiles it for a GPU.
    Raises NotImplementedError, with the reason and the backend that can, for what the kernel does not serve.
    """
    b, h, d = q.shape
    k, _, s, e = pages.shape
    m, group = blocks.shape[2], h // k
    refuse_unserved(q, pages)
    if config is None:
        config = heuristic(s, group, e)
    num_parts = -(-m // config.part)
    counts = jnp.minimum(counts, m)
    query = jnp.pad(q.reshape(b, k, group, d), ((0, 0), (0, 0), (0, columns(group) - group), (0, 0)))
    settings = {"config": config, "scale": scale, "soft_cap": soft_cap, "window": window}
    maximum, total, mixed, lse = plgpu.kernel(
        functools.partial(_attend_part, simulated=interpret is not None, **settings),
        out_type=(
            jax.ShapeDtypeStruct((b, k, num_parts, columns(group)), jnp.float32),
            jax.ShapeDtypeStruct((b, k, num_parts, columns(group)), jnp.float32),
            jax.ShapeDtypeStruct((b, k, num_parts, d, columns(group)), jnp.float32),
            jax.ShapeDtypeStruct((b, k, num_parts, config.part, columns(group)), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((columns(group), d), jnp.bfloat16, transforms=TILES),
            plgpu.SMEM((config.stages, s, e), jnp.bfloat16, transforms=TILES),
            plgpu.SMEM((columns(group), s), jnp.bfloat16, transforms=TILES),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=config.stages),
            plgpu.Barrier(num_barriers=config.stages),
        ),
        grid=(num_parts, k, b),
        grid_names=("part", "head", "row"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
    )(query, pages, page_table, blocks, counts, lengths)

    # parts past the end of a list were never written
    used_mask = (jnp.arange(num_parts) * config.part < counts[..., None])[..., None]
    out = _combine(
        jnp.where(used_mask, maximum[..., :group], -jnp.inf),
        jnp.where(used_mask, total[..., :group], 0.0),
        jnp.where(used_mask[..., None], mixed[..., :group], 0.0),
        None if sink_logits is None else sink_logits.astype(jnp.float32).reshape(k, group) * LOG2_E,
    )
    listed_mask = jnp.arange(m) < counts[..., None]
    block_lse = lse.reshape(b, k, num_parts * config.part, -1)[:, :, :m, :group]
    block_lse = jnp.where(listed_mask[..., None], block_lse, -jnp.inf)
    return out.swapaxes(2, 3).reshape(b, h, d).astype(q.dtype), block_lse.swapaxes(2, 3).reshape(b, h, m)


def refuse_unserved(q: Float[Array, "b h d"], pages: Float[Array, "k p s e"]) -> None:
    """Raise NotImplementedError for queries and pages that the kernel does not serve."""
    _, h, d = q.shape
    k, _, s, e = pages.shape
    taken = FEWEST_STAGES * page_bytes(s, e) + SMALL_SHARED
    reasons = {
        f"multiplies bfloat16, not {q.dtype} queries with {pages.dtype} pages": not (
            q.dtype == pages.dtype == jnp.bfloat16
        ),
        f"reads pages of {_listed(PAGE_SIZES)} tokens, not {s}": s not in PAGE_SIZES,
        f"has tiles for head dims {_listed(HEAD_DIMS)}, not {d}": d not in HEAD_DIMS,
        f"has columns for {MOST_QUERIES} query heads a KV head, not {h // k}": h // k > MOST_QUERIES,
        f"needs {taken // 1024} KiB of shared memory for {FEWEST_STAGES} such pages, of {MOST_SHARED // 1024}": (
            taken > MOST_SHARED
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise NotImplementedError(f'backend "gpu" {reason}: use "xla"')


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def _attend_part(
    # inputs, in global memory
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
    page_arrived,
    stage_free,
    *,
    config: Config,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    simulated: bool,
):
    """Attend to one part of one list. Logits have base 2 until a block's sum is written."""
    row, head, part = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("part")
    warpgroup = lax.axis_index("warpgroup")
    first = part * config.part
    count = jnp.clip(counts_ref[row, head] - first, 0, config.part)
    (num_columns, d), s = query_ref.shape, stages_ref.shape[1]

    @pl.when((warpgroup == PRODUCER) & (count > 0))
    def _():
        def fetch(i, _):
            stage = lax.rem(i, config.stages)
            page = table_ref[row, blocks_ref[row, head, first + i]]

            @pl.when(i >= config.stages)
            def _():
                plgpu.barrier_wait(stage_free.at[stage])

            plgpu.copy_gmem_to_smem(pages_ref.at[head, page], stages_ref.at[stage], page_arrived.at[stage])

        lax.fori_loop(0, count, fetch, None)

    @pl.when((warpgroup == CONSUMER) & (count > 0))
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], query_ref, query_arrived)
        length = lengths_ref[row]
        plgpu.barrier_wait(query_arrived)

        def meet(i, carry):
            maximum, total, mixed = carry
            stage = lax.rem(i, config.stages)
            end = length - blocks_ref[row, head, first + i] * s
            begin = 0 if window is None else end - window
            keys, values = (stages_ref.at[stage, :, pl.ds(start, d)] for start in (0, d))

            plgpu.barrier_wait(page_arrived.at[stage])
            logits = _product(keys, query_ref, simulated) * scale
            if soft_cap is not None:
                logits = soft_cap * jnp.tanh(logits / soft_cap)
            logits = jnp.where(_seen(logits.shape, begin, end), logits * LOG2_E, -jnp.inf)
            block_maximum = jnp.max(logits, axis=0)
            weights = jnp.exp2(logits - _below(_finite(block_maximum), logits.shape))
            block_total = jnp.sum(weights, axis=0)
            lse = (_finite(block_maximum) + jnp.log2(block_total)) / LOG2_E
            plgpu.store(lse_ref.at[row, head, part, i], lse, optimized=False)

            plgpu.store(weights_ref.transpose((1, 0)), weights.astype(jnp.bfloat16), optimized=False)
            _zero_unseen(values, begin, end)
            plgpu.commit_smem()  # wgmma must see what was stored
            update = _product(values.transpose((1, 0)), weights_ref, simulated)
            plgpu.barrier_arrive(stage_free.at[stage])

            new_maximum = jnp.maximum(maximum, block_maximum)
            decay = jnp.exp2(maximum - _finite(new_maximum))
            block_weight = jnp.exp2(block_maximum - _finite(new_maximum))
            mixed = mixed * _below(decay, mixed.shape) + update * _below(block_weight, mixed.shape)
            return new_maximum, total * decay + block_total * block_weight, mixed

        start = (
            plgpu.layout_cast(jnp.full((num_columns,), -jnp.inf, jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((num_columns,), jnp.float32), plgpu.Layout.WGMMA.reduce(0)),
            plgpu.layout_cast(jnp.zeros((d, num_columns), jnp.float32), plgpu.Layout.WGMMA),
        )
        maximum, total, mixed = lax.fori_loop(0, count, meet, start)
        plgpu.store(maximum_ref.at[row, head, part], maximum, optimized=False)
        plgpu.store(total_ref.at[row, head, part], total, optimized=False)
        plgpu.store(mixed_ref.at[row, head, part], mixed, optimized=False)


def _product(rows: Any, transposed: Any, simulated: bool) -> Float[Array, "x y"]:
    """Return rows "x z" @ transposed "y z" transposed in float32, from shared memory."""
    if simulated:
        product = jnp.dot(rows[...], transposed[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike a wgmma's, these reads must be fenced from the next copy into the page
        return product

    def accumulate(sum_ref):
        plgpu.wgmma(sum_ref, rows, transposed.transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(accumulate, plgpu.ACC((rows.shape[0], transposed.shape[0]), jnp.float32))


def _seen(shape: tuple[int, int], begin, end):
    """Return which rows stand for tokens at offsets [begin, end) of their page."""
    offset = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    return (offset >= begin) & (offset < end)


def _zero_unseen(values, begin, end) -> None:
    """Put 0 for the values of tokens outside [begin, end): 0 * NaN is NaN. Few pages have such tokens."""
    s, d = values.shape

    @pl.when((begin > 0) | (end < s))
    def _():
        for start in range(0, s, ROWS):
            rows = values.at[pl.ds(start, ROWS)]
            seen_mask = _seen((ROWS, d), begin - start, end - start)
            plgpu.store(rows, jnp.where(seen_mask, rows[...], jnp.zeros((), values.dtype)), optimized=False)


def _below(row: Float[Array, " g"], shape: tuple[int, int]) -> Float[Array, "x g"]:
    """Return the row repeated below itself."""
    return lax.broadcast_in_dim(row, shape, [1])


def _finite(maximum: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """Return the maximum, 0 where nothing was seen: -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)


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
    weight = jnp.exp2(maximum - _finite(top)[:, :, None])
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

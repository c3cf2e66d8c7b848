"""`paged_attention` on a TPU: a grid step per slot and KV head, whose listed pages are prefetched through a ring.

Rows of one slot are adjacent in the query group, so that a page is copied once for all of them.
"""

import operator
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import ring, tuned
from et_jax.pallas.checks import EIGHT_BITS, LANES, SUBLANES, wider
from et_jax.pallas.folding import by_head, by_row, most_together, split
from et_jax.pallas.ring import PageList, RingConfig
from et_jax.softmax import Softmax, finite

# A group's pages are processed as one, to share the overhead of a loop step. At head dim 128 a v6e transfers
# 1024 tokens in 560 cycles and the compiler emits about 510 instructions for them; half the tokens take more than half.
GROUP_TOKENS = 1024


def heuristic(pages: Array) -> RingConfig:
    """Return the ring for lists of pages of a pool."""
    _, _, s, e = pages.shape
    return ring.heuristic(GROUP_TOKENS, s, e, pages.dtype)


def paged_attention(
    q: Float[Array, "r h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"],
    counts: Int[Array, "b k"],
    lengths: Int[Array, " r"],
    *,
    softmax: Softmax,
    rows_per_slot: int = 1,
    readers: Int[Array, "b k m"] | None = None,
    kv_scales: Float[Array, "k p 2 s"] | None = None,
    config: RingConfig | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "r h d"], Float[Array, "r h m"]]:
    """Return what `api.paged_attention` documents. `interpret` runs the kernel on a CPU, for tests."""
    _, h, d = q.shape
    k, _, s, e = pages.shape
    n, m = page_table.shape[1], blocks.shape[2]

    def settings(rows: int) -> tuple[RingConfig, ring.Footprint]:
        facts = {"page_size": s, "head_dim": d, "queries": rows * h // k, "dtype": pages.dtype}
        walk = config or tuned.settings(heuristic(pages), "paged_attention/tpu", **facts)
        return walk, footprint(walk, pages, len(lengths) // rows, h, n, m, rows, readers is not None)

    ring.require_pages(pages)
    rows = most_together(rows_per_slot, lambda rows: settings(rows)[1].vector <= ring.VECTOR_MEMORY_BYTES)
    config, taken = settings(rows)
    ring.require_memory("scalar", taken.scalar, ring.SCALAR_MEMORY_BYTES, f"or pages of more than {s} tokens")
    ring.require_memory("vector", taken.vector, ring.VECTOR_MEMORY_BYTES, "or smaller pages")
    page_table, blocks, counts, readers = split(rows_per_slot, rows, page_table, blocks, counts, readers=readers)
    b, group = page_table.shape[0], config.group
    x, queries = b * k, rows * h // k
    padded = m + -m % LANES  # block sums are stored in full lanes, and a group is read entirely

    # A head narrower than full lanes is not sliced from its token: the query is padded with zeros for the value,
    # and the weights mix entire tokens, with the value in columns [d, 2d).
    joint = d % LANES != 0
    dtype = q.dtype if kv_scales is not None else wider(q.dtype, pages.dtype)
    width = e if joint else d
    query = by_head(q.astype(dtype), k, rows).reshape(x, queries, d)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, width - d)))
    # a sink is one more logit without a value: the initial state of the softmax
    sinks = jnp.full(h, -jnp.inf) if softmax.sink_logits is None else softmax.sink_logits
    sinks = jnp.tile(sinks.astype(jnp.float32).reshape(k, -1), (1, rows))
    lists, readers = jax.tree.map(lambda ids: jnp.pad(ids, ((0, 0), (0, 0), (0, padded - m))), (blocks, readers))
    lists, readers = jax.tree.map(lambda ids: ids.reshape(x, 1, padded), (lists, readers))
    table = page_table[:, None]

    def following(i):
        return jnp.minimum(i + 1, x - 1)

    def scalars(size, index):
        return pl.BlockSpec((1, 1, size), lambda i, *_: (index(i), 0, 0), memory_space=pltpu.SMEM)

    kernel = partial(
        _kernel, config=config, head_dim=d, joint=joint, softmax=softmax.without_sinks, num_heads=k, rows=rows
    )
    mixed, block_lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(x,),
            in_specs=[
                pl.BlockSpec((1, queries, width), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec((1, queries, 1), lambda i, *_: (i % k, 0, 0)),
                scalars(padded, lambda i: i),
                scalars(padded, following),
                scalars(n, lambda i: i // k),
                scalars(n, lambda i: following(i) // k),
                None if readers is None else scalars(padded, lambda i: i),
                pl.BlockSpec(memory_space=pl.ANY),
                None if kv_scales is None else pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((1, queries, width), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec((1, queries, padded), lambda i, *_: (i, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((config.depth, group, s, e), pages.dtype),
                None if kv_scales is None else pltpu.VMEM((config.depth, group, 2, s), jnp.float32),
                pltpu.SemaphoreType.DMA((config.depth,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((x, queries, width), q.dtype),
            jax.ShapeDtypeStruct((x, queries, padded), jnp.float32),
        ],
        # Grid steps run in order on one core: each starts copies for the next. Checking a copy's bounds takes more
        # instructions than starting it (21 against 14, by the v5e's compiler); only the interpreter needs the check.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
        name="paged_attention",
    )(
        jnp.pad(jnp.minimum(counts, m).reshape(x), (0, 1)),  # no list follows the last one
        lengths,
        query,
        sinks[..., None],
        lists,
        lists,
        table,
        table,
        readers,
        pages,
        kv_scales,
    )
    out = mixed[..., d : 2 * d] if joint else mixed
    out, block_lse = (each.reshape(b, k, queries, -1) for each in (out, block_lse[..., :m]))
    return by_row(out, rows), by_row(block_lse, rows)


def footprint(
    config: RingConfig, pages: Array, b: int, h: int, n: int, m: int, rows: int = 1, read_apart: bool = False
) -> ring.Footprint:
    """Return the memory used by b slots, page tables of n entries and lists of m.

    Each slot has `rows` rows of h query heads, which read the same blocks unless they `read_apart`.
    """
    k, _, s, e = pages.shape
    m += -m % LANES
    queries = rows * h // k
    queries += -queries % SUBLANES  # full registers
    # counts and lengths; twice, for the prefetch: the list and the table of this step and of the next
    scalar = 4 * (b * k + 1 + b * rows + 2 * 2 * (m + n))
    if read_apart:
        scalar += 4 * 2 * m
    converted = 0
    if pages.dtype in EIGHT_BITS:  # a group in the dtype of the query, at most float32
        converted = 4 * config.group * s * e
    # twice: query, output and block sums; once for each page of a group: its query, scores and temporaries
    vector = 2 * 4 * queries * (2 * e + m) + 4 * queries * config.group * (4 * max(s, LANES) + 2 * e)
    return ring.Footprint(scalar=scalar, vector=vector + converted + config.num_bytes(ring.page_bytes(pages)))


def _kernel(
    # prefetched scalars
    counts_ref,
    lengths_ref,
    # inputs
    query_ref,
    sink_ref,
    blocks_ref,
    next_blocks_ref,
    table_ref,
    next_table_ref,
    readers_ref,  # None if every row reads every block
    pages_ref,
    scales_ref,  # None unless the pool is in 8 bits
    # outputs
    out_ref,
    lse_ref,
    # scratch
    buffers_ref,
    scale_buffers_ref,  # likewise
    arrived,
    first_ref,
    *,
    config: RingConfig,
    head_dim: int,
    joint: bool,
    softmax: Softmax,
    num_heads: int,
    rows: int,
):
    """Compute the attention of the rows of one slot and KV head."""
    group, window = config.group, softmax.window
    _, _, s, e = buffers_ref.shape
    queries, width = query_ref.shape[1:]
    this = pl.program_id(0)
    lengths = [lengths_ref[this // num_heads * rows + row] for row in range(rows)]
    length = reduce(jnp.maximum, lengths)
    behind = [length - each for each in lengths]

    def listed(step, blocks_ref, table_ref):
        return PageList(
            head=step % num_heads,
            num_groups=pl.cdiv(counts_ref[step], group),
            count=lambda i: jnp.clip(counts_ref[step] - i * group, 0, group),
            page=lambda i, j: table_ref[0, 0, blocks_ref[0, 0, i * group + j]],
        )

    own, following = listed(this, blocks_ref, table_ref), listed(this + 1, next_blocks_ref, next_table_ref)
    pools = ((pages_ref, buffers_ref),)
    arrivals = ring.Ring(
        pools=pools if scales_ref is None else (*pools, (scales_ref, scale_buffers_ref)),
        arrived=arrived,
        first_ref=first_ref,
        own=own,
        following=following,
    )

    def page_end(i, j):
        """Return where the longest row ends, from the first token of entry j of group i; 0 if it is not listed."""
        block = blocks_ref[0, 0, i * group + j]
        return jnp.where(j < own.count(i), length - block * s, 0)

    def seen(offset, end):
        return (offset < end) if window is None else (offset < end) & (offset >= end - window)

    def clean(i, buffer):
        """Zero the values that no query attends to, if a group of floats has any: 0 * NaN is NaN."""
        padding = joint and e > 2 * head_dim
        # ids ascend: if the last page is full all are; if the window contains the first page, it contains them all
        full = page_end(i, group - 1) >= s
        if window is not None:
            full &= page_end(i, 0) <= window

        def clean_page(j, _):
            offset = lax.broadcasted_iota(jnp.int32, (s, e), 0)
            visible = reduce(operator.or_, [seen(offset, page_end(i, j) - each) for each in behind])
            if padding:
                visible &= lax.broadcasted_iota(jnp.int32, (s, e), 1) < 2 * head_dim
            buffers_ref[buffer, j] = jnp.where(visible, buffers_ref[buffer, j], 0.0)

        @pl.when(padding | ~full)
        def _():
            lax.fori_loop(0, group, clean_page, None)

    arrivals.open(this == 0)
    lse_ref[...] = jnp.full(lse_ref.shape, -jnp.inf, jnp.float32)
    query = jnp.broadcast_to(query_ref[...], (group, queries, width))
    row_of = lax.broadcasted_iota(jnp.int32, (1, queries, 1), 1) // (queries // rows)
    lag = sum(jnp.where(row_of == row, behind[row], 0) for row in range(rows)) if rows > 1 else 0
    dot = partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if query.dtype == jnp.float32 else None,
    )

    def by_page(i, value_of):
        """Return a number per page of group i, broadcast over the page's scores "q s"."""
        return jnp.concatenate([jnp.full((1, queries, s), value_of(i * group + j)) for j in range(group)])

    def step(i, carry):
        maximum, total, mixed = carry
        buffer = arrivals.next(i)
        if scales_ref is None:
            clean(i, buffer)
        token = buffers_ref[buffer].astype(query.dtype)
        if buffers_ref.dtype == jnp.float8_e4m3fn:  # uncopied buffers may contain anything
            token = jnp.where(jnp.abs(token) < jnp.inf, token, 0.0)
        key, value = (token, token) if joint else (token[..., :head_dim], token[..., head_dim : 2 * head_dim])

        scores = (
            dot(query, key, (((2,), (2,)), ((0,), (0,)))) * softmax.scale
        )  # "p q s", a page's tokens along the lanes
        if scales_ref is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
            scores *= scale_buffers_ref[buffer, :, pl.ds(0, 1), :]
        scores = softmax.capped(scores)
        ends = jnp.concatenate([jnp.full((1, queries, s), page_end(i, j), jnp.int32) for j in range(group)])
        seen_mask = seen(lax.broadcasted_iota(jnp.int32, scores.shape, 2) + lag, ends)
        if readers_ref is not None:
            seen_mask &= (by_page(i, lambda entry: readers_ref[0, 0, entry]) >> row_of) & 1 == 1
        scores = jnp.where(seen_mask, scores, -jnp.inf)

        # one exponential per token, relative to its own block's maximum, gives the block's sum and the output
        block_maximum = jnp.max(scores, axis=2, keepdims=True)
        weights = jnp.exp(scores - finite(block_maximum))
        block_total = jnp.sum(weights, axis=2, keepdims=True)
        _store(lse_ref, i * group, finite(block_maximum) + jnp.log(block_total))

        new_maximum = jnp.maximum(maximum, jnp.max(block_maximum, axis=0))
        block_weight = jnp.exp(block_maximum - finite(new_maximum))
        decay = jnp.exp(maximum - finite(new_maximum))
        total = total * decay + jnp.sum(block_total * block_weight, axis=0)
        weights *= block_weight
        if scales_ref is not None:
            weights = jnp.where(seen_mask, weights * scale_buffers_ref[buffer, :, pl.ds(1, 1), :], 0.0)  # 0 * NaN
        update = dot(weights.astype(value.dtype), value, (((2,), (1,)), ((0,), (0,))))
        return new_maximum, total, mixed * decay + jnp.sum(update, axis=0)

    maximum = sink_ref[0]
    total = jnp.where(maximum == -jnp.inf, 0.0, 1.0)
    mixed = jnp.zeros((queries, width), jnp.float32)
    _, total, mixed = lax.fori_loop(0, own.num_groups, step, (maximum, total, mixed))
    out_ref[0] = (mixed / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)
    arrivals.close()


def _store(lse_ref, position, block_lse):
    """Store the sums "p q 1" of a group of blocks at list positions from `position` on, along the lanes."""
    chunk = pl.ds(pl.multiple_of(position // LANES * LANES, LANES), LANES)
    lse = lse_ref[0, :, chunk]
    place = lax.broadcasted_iota(jnp.int32, lse.shape, 1) - position % LANES
    for j in range(block_lse.shape[0]):
        lse = jnp.where(place == j, block_lse[j], lse)
    lse_ref[0, :, chunk] = lse

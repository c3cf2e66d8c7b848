"""`paged_attention` on a TPU: one grid step a row and KV head, pages copied ahead through a ring of buffers.

A group of listed pages is copied into one buffer of the ring while the groups before it are worked on.
The copies run ahead over the end of a list: while the last groups of a row are worked on, the first groups
of the next row are already on their way, so that short rows do not pay for the latency of memory.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from et_jax.pallas.checks import LANES

# A group is worked on as one; large enough that its products hide the cost of a step of the loop.
GROUP_TOKENS = 512
# What must be on its way for memory never to wait: bandwidth times latency, 1.6 TB/s (v6e) times about 1.5 us.
BYTES_IN_FLIGHT = 2**21 + 2**19
# Kernels get 16 MiB of a core's vector memory unless they ask for more; the ring takes half of that.
RING_BYTES = 2**23
VECTOR_MEMORY_BYTES = 2**24
# A v5e or v6e core has 1 MiB of scalar memory; the compiler keeps some.
SCALAR_MEMORY_BYTES = 2**20 - 2**14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the list is walked.

    group: list entries worked on at once, a power of two, at most 128; the same for every batch, count and list.
    depth: buffers in the ring, each of one group; all but one are on their way while that one is worked on.
    """

    group: int
    depth: int


def heuristic(page_size: int, width: int, dtype: jnp.dtype) -> Config:
    """Return the walk for a page size in tokens, a token's width and the dtype of the pool."""
    page_bytes = page_size * width * jnp.dtype(dtype).itemsize
    group = max(1, min(LANES, GROUP_TOKENS // page_size, RING_BYTES // 4 // page_bytes))
    group = 1 << (group.bit_length() - 1)
    ahead = -(-BYTES_IN_FLIGHT // (group * page_bytes))
    return Config(group=group, depth=max(3, min(1 + ahead, RING_BYTES // (group * page_bytes))))


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
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "b h d"], Float[Array, "b h m"]]:
    """Return what `api.paged_attention` documents. `interpret` runs the kernel on a CPU, for tests."""
    b, h, d = q.shape
    k, _, s, e = pages.shape
    n, m, x, g = page_table.shape[1], blocks.shape[2], b * k, h // k
    if config is None:
        config = heuristic(s, e, pages.dtype)
    group = config.group
    padded = m + -m % LANES  # block sums are stored in whole lanes, and a group is read whole
    _require_room(config, pages, x + b, n, padded, g)

    # A head that fills no whole lanes is not cut from its token: zeros beside the query stand against the value,
    # and what the weights mix is the token, the value in its columns [d, 2d).
    joint = d % LANES != 0
    dtype = jnp.promote_types(q.dtype, pages.dtype)
    width = e if joint else d
    query = jnp.pad(q.astype(dtype).reshape(x, g, d), ((0, 0), (0, 0), (0, width - d)))
    # a sink is one more logit that mixes nothing in: the softmax starts from it
    sinks = jnp.full(h, -jnp.inf, jnp.float32) if sink_logits is None else sink_logits.astype(jnp.float32)
    lists = jnp.pad(blocks, ((0, 0), (0, 0), (0, padded - m))).reshape(x, 1, padded)
    table = page_table[:, None]

    def following(i):
        return jnp.minimum(i + 1, x - 1)

    def scalars(size, index):
        return pl.BlockSpec((1, 1, size), lambda i, *_: (index(i), 0, 0), memory_space=pltpu.SMEM)

    kernel = partial(
        _kernel, config=config, head_dim=d, joint=joint, scale=scale, soft_cap=soft_cap, window=window, num_heads=k
    )
    mixed, block_lse = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(x,),
            in_specs=[
                pl.BlockSpec((1, g, width), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec((1, g, 1), lambda i, *_: (i % k, 0, 0)),
                scalars(padded, lambda i: i),
                scalars(padded, following),
                scalars(n, lambda i: i // k),
                scalars(n, lambda i: following(i) // k),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[
                pl.BlockSpec((1, g, width), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec((1, g, padded), lambda i, *_: (i, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM((config.depth, group, s, e), pages.dtype),
                pltpu.SemaphoreType.DMA((config.depth,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((x, g, width), q.dtype),
            jax.ShapeDtypeStruct((x, g, padded), jnp.float32),
        ],
        # rows run in order on one core: each starts copies for the next
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_attention",
    )(
        jnp.pad(counts.reshape(x), (0, 1)),  # nothing follows the last row
        lengths,
        query,
        sinks.reshape(k, g, 1),
        lists,
        lists,
        table,
        table,
        pages,
    )
    out = mixed[..., d : 2 * d] if joint else mixed
    return out.reshape(b, h, d), block_lse[..., :m].reshape(b, h, m)


def _require_room(config: Config, pages: Array, num_scalars: int, n: int, m: int, g: int) -> None:
    """Raise NotImplementedError for what the chip's memories cannot hold, before anything is compiled."""
    _, _, s, e = pages.shape
    itemsize = pages.dtype.itemsize
    sublanes = 32 // itemsize
    if s % sublanes:
        raise NotImplementedError(
            f'backend "tpu" reads pages of a multiple of {sublanes} tokens in {pages.dtype}, not {s}: use "xla"'
        )
    # the row's own list and table and the next row's, each in two buffers
    scalar_bytes = 4 * num_scalars + 4 * 2 * 2 * (m + n)
    if scalar_bytes > SCALAR_MEMORY_BYTES:
        raise NotImplementedError(
            f'backend "tpu": lists of {m} and tables of {n} entries take {scalar_bytes} of {SCALAR_MEMORY_BYTES} bytes '
            f'of scalar memory: use "xla", or pages of more than {s} tokens'
        )
    ring_bytes = config.depth * config.group * s * e * itemsize
    # the group padded to whole registers; queries, output and block sums in two buffers; a group's scores and weights
    rows = g + -g % 8
    vector_bytes = ring_bytes + 2 * 4 * rows * (2 * e + m) + 4 * rows * config.group * max(s, LANES) * 4
    if vector_bytes > VECTOR_MEMORY_BYTES:
        raise NotImplementedError(
            f'backend "tpu": pages of {s} tokens and lists of {m} entries take {vector_bytes} of {VECTOR_MEMORY_BYTES} '
            'bytes of vector memory: use "xla"'
        )


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
    pages_ref,
    # outputs
    out_ref,
    lse_ref,
    # scratch
    ring_ref,
    arrived,
    first_ref,
    *,
    config: Config,
    head_dim: int,
    joint: bool,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    num_heads: int,
):
    """Attend one row and KV head. Group i of its list arrives in buffer (first + i) % depth."""
    group, depth = config.group, config.depth
    _, _, s, e = ring_ref.shape
    g, width = query_ref.shape[1:]
    row = pl.program_id(0)
    length = lengths_ref[row // num_heads]
    num_groups = pl.cdiv(counts_ref[row], group)

    @pl.when(row == 0)
    def _():
        first_ref[0] = 0

    first = first_ref[0]

    def listed(row, i):
        """How many entries of a row's group i are listed."""
        return jnp.clip(counts_ref[row] - i * group, 0, group)

    def start_group(row, i, slot, blocks_ref, table_ref):
        def start_page(j, _):
            page = table_ref[0, 0, blocks_ref[0, 0, i * group + j]]
            source = pages_ref.at[row % num_heads, page]
            pltpu.make_async_copy(source, ring_ref.at[slot, j], arrived.at[slot]).start()

        lax.fori_loop(0, listed(row, i), start_page, None)

    def start(i):
        """Start the copies of group i, counted on from this row's groups into the next row's."""
        slot = lax.rem(first + i, depth)

        @pl.when(i < num_groups)
        def _():
            start_group(row, i, slot, blocks_ref, table_ref)

        @pl.when(i >= num_groups)
        def _():
            start_group(row + 1, i - num_groups, slot, next_blocks_ref, next_table_ref)

    def wait(i, slot):
        def wait_page(j, _):
            # any page will do as the source: a wait asks how much arrived, not from where
            pltpu.make_async_copy(pages_ref.at[0, 0], ring_ref.at[slot, j], arrived.at[slot]).wait()

        lax.fori_loop(0, listed(row, i), wait_page, None)

    def page_end(i, j):
        """Where the sequence ends, counted from the first token of entry j of group i; 0 if it is not listed."""
        block = blocks_ref[0, 0, i * group + j]
        return jnp.where(j < listed(row, i), length - block * s, 0)

    def seen(offset, end):
        return (offset < end) if window is None else (offset < end) & (offset >= end - window)

    def clean(i, slot):
        """Zero what no query sees, where a page holds any: 0 * NaN is NaN."""
        padding = joint and e > 2 * head_dim

        def clean_page(j, _):
            end = page_end(i, j)
            whole = (end >= s) if window is None else (end >= s) & (end <= window)

            @pl.when(padding | ~whole)
            def _():
                kept = seen(lax.broadcasted_iota(jnp.int32, (s, e), 0), end)
                if padding:
                    kept &= lax.broadcasted_iota(jnp.int32, (s, e), 1) < 2 * head_dim
                ring_ref[slot, j] = jnp.where(kept, ring_ref[slot, j], 0.0)

        lax.fori_loop(0, group, clean_page, None)

    # the row before started this one's first depth - 1 groups; those that this list lacks are the next row's
    lax.fori_loop(jnp.where(row == 0, 0, jnp.minimum(num_groups, depth - 1)), depth - 1, lambda i, _: start(i), None)
    lse_ref[...] = jnp.full(lse_ref.shape, -jnp.inf, jnp.float32)
    query = jnp.broadcast_to(query_ref[...], (group, g, width))
    dot = partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if query.dtype == jnp.float32 else None,
    )

    def step(i, carry):
        maximum, total, mixed = carry
        start(i + depth - 1)  # into the buffer that was worked on last
        slot = lax.rem(first + i, depth)
        wait(i, slot)
        clean(i, slot)
        token = ring_ref[slot].astype(query.dtype)
        key, value = (token, token) if joint else (token[..., :head_dim], token[..., head_dim : 2 * head_dim])

        scores = dot(query, key, (((2,), (2,)), ((0,), (0,)))) * scale  # "p g s", a page's tokens along the lanes
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        ends = jnp.concatenate([jnp.full((1, g, s), page_end(i, j), jnp.int32) for j in range(group)])
        scores = jnp.where(seen(lax.broadcasted_iota(jnp.int32, scores.shape, 2), ends), scores, -jnp.inf)

        # one exponential a token, against its own block's maximum, serves the block's sum and the output
        block_maximum = jnp.max(scores, axis=2, keepdims=True)
        weights = jnp.exp(scores - _finite(block_maximum))
        block_total = jnp.sum(weights, axis=2, keepdims=True)
        _store(lse_ref, i * group, _finite(block_maximum) + jnp.log(block_total))

        new_maximum = jnp.maximum(maximum, jnp.max(block_maximum, axis=0))
        block_weight = jnp.exp(block_maximum - _finite(new_maximum))
        decay = jnp.exp(maximum - _finite(new_maximum))
        total = total * decay + jnp.sum(block_total * block_weight, axis=0)
        update = dot((weights * block_weight).astype(value.dtype), value, (((2,), (1,)), ((0,), (0,))))
        return new_maximum, total, mixed * decay + jnp.sum(update, axis=0)

    maximum = sink_ref[0]
    total = jnp.where(maximum == -jnp.inf, 0.0, 1.0)
    mixed = jnp.zeros((g, width), jnp.float32)
    _, total, mixed = lax.fori_loop(0, num_groups, step, (maximum, total, mixed))
    out_ref[0] = (mixed / jnp.where(total == 0.0, 1.0, total)).astype(out_ref.dtype)
    first_ref[0] = lax.rem(first + num_groups, depth)


def _store(lse_ref, position, block_lse):
    """Store the sums "p g 1" of a group of blocks at list positions from `position` on, along the lanes."""
    chunk = pl.ds(pl.multiple_of(position // LANES * LANES, LANES), LANES)
    lse = lse_ref[0, :, chunk]
    place = lax.broadcasted_iota(jnp.int32, lse.shape, 1) - position % LANES
    for j in range(block_lse.shape[0]):
        lse = jnp.where(place == j, block_lse[j], lse)
    lse_ref[0, :, chunk] = lse


def _finite(maximum: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the maximum, 0 where nothing was seen: -inf - -inf is NaN."""
    return jnp.where(maximum == -jnp.inf, 0.0, maximum)

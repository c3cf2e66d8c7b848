"""`paged_prefill` on a TPU: a grid step for each tile of queries, whose pages are prefetched through a ring.

The pages are the listed ones or, without lists, those that some query of the tile attends to.

Groups of pages begin at fixed multiples of their size, and a group invisible to a query changes no bit of
its output, so a chunk may be cut anywhere.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import ring, tuned
from et_jax.pallas.checks import EIGHT_BITS, LANES, require, wider
from et_jax.pallas.paged_prefill.tpu_sums import store_sums
from et_jax.softmax import Softmax, finite

# Rows of queries that share a read of the keys: at one flop per byte and row (bfloat16) products and transfers balance
# at 240 rows on a v5e (197 TFLOP/s over 0.82 TB/s) and at 560 on a v6e (918 over 1.64).
QUERY_ROWS = 512
# Keys processed as one: a tile's scores against them are 1 MiB of vector memory.
GROUP_TOKENS = 512
NEVER = 2**30  # the position of an unlisted token: beyond every query, and differences do not overflow
TILE_STEP = 16  # a tile is full registers of bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the queries are split. tile: tokens per grid step, a multiple of 16. ring: the ring of the pages."""

    tile: int
    ring: ring.RingConfig

    def __post_init__(self) -> None:
        require(self.tile >= 1 and self.tile % TILE_STEP == 0, "tile", self.tile, f"a multiple of {TILE_STEP}")


def heuristic(chunk: int, group: int, pages: Array) -> Config:
    """Return the settings for a chunk in tokens, query heads per KV head and a pool."""
    _, _, s, e = pages.shape
    tile = max(TILE_STEP, min(QUERY_ROWS // group, chunk + -chunk % TILE_STEP) // TILE_STEP * TILE_STEP)
    return Config(tile=tile, ring=ring.heuristic(GROUP_TOKENS, s, e, pages.dtype))


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
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t h m"] | None]:
    """Return what `api.paged_prefill` documents, with None for block sums that are not requested.

    interpret: run the kernel on a CPU, for tests.
    """
    b, t, h, d = q.shape
    k, _, s, e = pages.shape
    g, n = h // k, page_table.shape[1]
    if config is None:
        facts = {"page_size": s, "head_dim": d, "queries": g, "chunk": t, "dtype": pages.dtype}
        config = tuned.settings(heuristic(t, g, pages), "paged_prefill/tpu", **facts)
    tile, tiles = config.tile, -(-t // config.tile)
    ring.require_pages(pages)
    m = n if blocks is None else blocks.shape[2]
    padded = m + -m % LANES  # block sums are stored in full lanes, and a group is read entirely
    taken = footprint(config, pages, b, g, n, listed=0 if blocks is None else m, summed=m if block_lse else 0)
    ring.require_memory("scalar", taken.scalar, ring.SCALAR_MEMORY_BYTES, f"or pages of more than {s} tokens")
    advice = "or shorter lists" if block_lse else "or smaller pages"
    ring.require_memory("vector", taken.vector, ring.VECTOR_MEMORY_BYTES, advice)

    # a head narrower than full lanes is not sliced from its token, as in `paged_attention`
    joint = d % LANES != 0
    dtype = wider(q.dtype, pages.dtype)
    width = e if joint else d
    query = q.astype(dtype).reshape(b, t, k, g, d).transpose(0, 2, 3, 1, 4).reshape(b * k, g, t, d)
    query = jnp.pad(query, ((0, 0), (0, 0), (0, tiles * tile - t), (0, width - d)))
    # a sink is one more logit without a value: the initial state of the softmax
    sinks = jnp.full(h, -jnp.inf) if softmax.sink_logits is None else softmax.sink_logits
    sinks = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(k, g, 1, 1), (k, g, tile, 1))
    table = page_table[:, None]
    steps = b * k * tiles

    def scalars(size, share, ahead):
        """Return the spec of an array's row, one per `share` grid steps, for the grid step `ahead` of this one."""

        def index(i, *_):
            return jnp.minimum(i + ahead, steps - 1) // share, 0, 0

        return pl.BlockSpec((1, 1, size), index, memory_space=pltpu.SMEM)

    def queries(columns):
        return pl.BlockSpec((1, g, tile, columns), lambda i, *_: (i // tiles, 0, i % tiles, 0))

    if blocks is None or counts is None:
        lists = entries = list_spec = next_list_spec = None
    else:
        lists = jnp.pad(blocks, ((0, 0), (0, 0), (0, padded - m))).reshape(b * k, 1, padded)
        entries = jnp.pad(jnp.minimum(counts, m).reshape(b * k), (0, 1))  # no list follows the last grid step
        list_spec, next_list_spec = (scalars(padded, tiles, ahead) for ahead in (0, 1))
    sums = jax.ShapeDtypeStruct((*query.shape[:-1], padded), jnp.float32) if block_lse else None
    mixed, lse = pl.pallas_call(
        partial(
            _kernel,
            chunk=t,
            tiles=tiles,
            num_heads=k,
            head_dim=d,
            joint=joint,
            softmax=softmax.without_sinks,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=[
                queries(width),
                pl.BlockSpec((1, g, tile, 1), lambda i, *_: (i // tiles % k, 0, 0, 0)),
                list_spec,
                next_list_spec,
                scalars(n, k * tiles, 0),
                scalars(n, k * tiles, 1),
                pl.BlockSpec(memory_space=pl.ANY),
                None if kv_scales is None else pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[queries(width), queries(padded) if block_lse else None],
            scratch_shapes=[
                pltpu.VMEM((config.ring.depth, config.ring.group, s, e), pages.dtype),
                None if kv_scales is None else pltpu.VMEM((config.ring.depth, config.ring.group, 2, s), jnp.float32),
                pltpu.SemaphoreType.DMA((config.ring.depth,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(query.shape, q.dtype), sums],
        # tiles run in order on one core: each starts copies for the next
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="paged_prefill",
    )(jnp.pad(starts, (0, 1)), entries, query, sinks, lists, lists, table, table, pages, kv_scales)

    def by_query(tiled):
        return tiled[:, :, :t].reshape(b, k, g, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)

    out = mixed[..., d : 2 * d] if joint else mixed
    return by_query(out), None if lse is None else by_query(lse[..., :m])


def footprint(
    config: Config, pages: Array, b: int, g: int, n: int, *, listed: int = 0, summed: int = 0
) -> ring.Footprint:
    """Return the memory used by b rows with g query heads a KV head and page tables of n entries.

    listed: entries of a list, 0 without lists. summed: entries whose sums are returned, 0 for none.
    """
    k, _, _, e = pages.shape
    listed, summed = listed + -listed % LANES, summed + -summed % LANES
    rows, span = g * config.tile, config.ring.group * pages.shape[2]
    # starts and counts; twice, for the prefetch: list and table of this row and of the next
    scalar = 4 * (b + 1 + b * k + 1 + 2 * 2 * (listed + n))
    # twice: query, output, sinks and block sums; once: the mixed values, and a group's scores, mask and weights
    vector = 4 * rows * (2 * (2 * e + LANES + summed) + 2 * e + 3 * span)
    # a group of 8 bits in the dtype of the query, at most float32
    converted = 4 * span * e if pages.dtype in EIGHT_BITS else 0
    return ring.Footprint(scalar=scalar, vector=vector + converted + config.ring.num_bytes(ring.page_bytes(pages)))


def _kernel(
    # prefetched scalars
    starts_ref,
    counts_ref,  # None without lists
    # inputs
    query_ref,
    sink_ref,
    blocks_ref,  # these two likewise
    next_blocks_ref,
    table_ref,
    next_table_ref,
    pages_ref,
    scales_ref,  # None unless the pool is in 8 bits
    # outputs
    out_ref,
    lse_ref,  # None unless block sums are requested
    # scratch
    buffers_ref,
    scale_buffers_ref,  # likewise
    arrived,
    first_ref,
    *,
    chunk: int,
    tiles: int,
    num_heads: int,
    head_dim: int,
    joint: bool,
    softmax: Softmax,
):
    """Compute the attention of one tile of queries of one row and KV head."""
    _, group, s, e = buffers_ref.shape
    _, g, tile, width = query_ref.shape
    window = softmax.window
    index = pl.program_id(0)

    def first_position(index):
        return starts_ref[index // (num_heads * tiles)] + index % tiles * tile

    def first_group(index):
        """Return the first group to read: of a list the first, without one the first that is in the window."""
        if window is None or counts_ref is not None:
            return 0
        return jnp.maximum(first_position(index) - window + 1, 0) // (group * s)

    def end(index, table_ref):
        """Return the end of the walk, in entries of the list or of the table."""
        if counts_ref is not None:
            return counts_ref[index // tiles]
        stop = jnp.minimum(first_position(index) + tile, starts_ref[index // (num_heads * tiles)] + chunk)
        # no list follows the last grid step
        return jnp.where(index < pl.num_programs(0), jnp.minimum(pl.cdiv(stop, s), table_ref.shape[2]), 0)

    def pages_to_read(index, blocks_ref, table_ref):
        first, stop = first_group(index), end(index, table_ref)

        def page(i, j):
            entry = (first + i) * group + j
            return table_ref[0, 0, entry if blocks_ref is None else blocks_ref[0, 0, entry]]

        return ring.PageList(
            head=index // tiles % num_heads,
            num_groups=jnp.maximum(pl.cdiv(stop, group) - first, 0),
            count=lambda i: jnp.clip(stop - (first + i) * group, 0, group),
            page=page,
        )

    own = pages_to_read(index, blocks_ref, table_ref)
    pools = ((pages_ref, buffers_ref),)
    arrivals = ring.Ring(
        pools=pools if scales_ref is None else (*pools, (scales_ref, scale_buffers_ref)),
        arrived=arrived,
        first_ref=first_ref,
        own=own,
        following=pages_to_read(index + 1, next_blocks_ref, next_table_ref),
    )
    arrivals.open(index == 0)
    if lse_ref is not None:
        lse_ref[...] = jnp.full(lse_ref.shape, -jnp.inf, jnp.float32)
    query = query_ref[0].reshape(g * tile, width)
    dot = partial(
        lax.dot_general,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if query.dtype == jnp.float32 else None,
    )

    def read(buffer):
        """Return keys and values of a group.

        A value that some query must not attend to may be anything, and 0 * NaN is NaN: invalid values are read as 0.
        Their keys are read as NaN, so that queries that do attend to them still return NaN.
        """
        token = buffers_ref[buffer].reshape(group * s, e).astype(query.dtype)
        if buffers_ref.dtype == jnp.int8:  # always finite; so are 8-bit floats, except in uncopied buffers
            return (token, token) if joint else (token[:, :head_dim], token[:, head_dim : 2 * head_dim])
        if joint and e > 2 * head_dim:
            token = jnp.where(lax.broadcasted_iota(jnp.int32, token.shape, 1) < 2 * head_dim, token, 0.0)
        if joint:  # the query is padded with zeros for the value, and 0 * NaN is NaN
            return token, jnp.where(_is_finite(token), token, 0.0)
        key, value = token[:, :head_dim], token[:, head_dim : 2 * head_dim]
        is_finite = _is_finite(value)
        return jnp.where(is_finite, key, jnp.nan), jnp.where(is_finite, value, 0.0)

    def scales(buffer, row):
        """Return the scales "1 tokens" of a group's keys, row 0, or of its values, row 1."""
        return jnp.concatenate([scale_buffers_ref[buffer, j, pl.ds(row, 1), :] for j in range(group)], axis=1)

    # the position of each query in the sequence, less the token's place in its group
    rows = (g, tile, group * s)
    ahead = lax.broadcasted_iota(jnp.int32, rows, 1) - lax.broadcasted_iota(jnp.int32, rows, 2)
    ahead = ahead.reshape(g * tile, group * s) + first_position(index)

    def origin(i):
        """Return the positions of a group's tokens, less their places in it: one number, or with lists "1 tokens"."""
        entry = (first_group(index) + i) * group
        if blocks_ref is None:
            return entry * s
        lane = lax.broadcasted_iota(jnp.int32, (1, group * s), 1)
        place = jnp.full((1, group * s), NEVER, jnp.int32)
        for j in range(group):
            stands = jnp.where(j < own.count(i), (blocks_ref[0, 0, entry + j] - j) * s, NEVER)
            place = jnp.where(lane >= j * s, stands, place)
        return place

    def step(i, carry):
        maximum, total, mixed = carry
        buffer = arrivals.next(i)
        key, value = read(buffer)
        scores = dot(query, key, (((1,), (1,)), ((), ()))) * softmax.scale
        if scales_ref is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
            key_scale, value_scale = scales(buffer, 0), scales(buffer, 1)
            scores *= jnp.where(_is_finite(value_scale), key_scale, jnp.nan)  # an invalid value makes its scale NaN
        scores = softmax.capped(scores)
        behind = ahead - origin(i)
        seen_mask = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
        scores = jnp.where(seen_mask, scores, -jnp.inf)
        if lse_ref is not None:
            store_sums(lse_ref, (first_group(index) + i) * group, scores, s)

        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1, keepdims=True))
        decay = jnp.exp(maximum - finite(new_maximum))
        weights = jnp.exp(scores - finite(new_maximum))
        total = total * decay + jnp.sum(weights, axis=1, keepdims=True)
        if scales_ref is not None:
            weights *= jnp.where(_is_finite(value_scale), value_scale, 0.0)
        update = dot(weights.astype(value.dtype), value, (((1,), (0,)), ((), ())))
        return new_maximum, total, mixed * decay + update

    maximum = sink_ref[0].reshape(g * tile, 1)
    total = jnp.where(maximum == -jnp.inf, 0.0, 1.0)
    mixed = jnp.zeros((g * tile, width), jnp.float32)
    _, total, mixed = lax.fori_loop(0, own.num_groups, step, (maximum, total, mixed))
    out = mixed / jnp.where(total == 0.0, 1.0, total)
    out_ref[0] = out.reshape(g, tile, width).astype(out_ref.dtype)
    arrivals.close()


def _is_finite(x: Float[Array, "..."]) -> Array:
    return jnp.abs(x) < jnp.inf

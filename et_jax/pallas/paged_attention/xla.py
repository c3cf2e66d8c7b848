"""`paged_attention` without Pallas: an online softmax over fixed groups of list entries.

Slots are walked in tiles of similar list lengths, and a tile's loop stops at its
longest list; if most of that work would be for ended lists, one slot after the other is walked.
A group past the end of a row's list changes no bit of that row: its maximum stays, the old sums are scaled
by exactly 1 and exactly 0 is added. On a CPU, entries far behind in a list are processed in larger groups: an entry's
group follows from its place in the list only, so a row is summed in the same order in any batch.

Rows of one slot share the gathered tokens. Everything between gather and products is computed row by row, in arrays of
the shape of as many slots of one row: XLA rounds an exponential differently in another shape.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax import sums
from et_jax.pallas import tuned
from et_jax.pallas.apart import apart_or_together, in_tiles
from et_jax.pallas.backend import platform
from et_jax.pallas.checks import padded_width, require_counts, wider
from et_jax.pallas.folding import split
from et_jax.pallas.gather import page_rows, token_scales, tokens
from et_jax.pallas.paged_attention.splits import NUM_SPLITS, Running, Slots, begun, in_splits
from et_jax.pallas.workspace import Workspace
from et_jax.softmax import Softmax, finite

# Measured on x86-64 with two cores. Small pages are for short rows: at 16 rows of 64 tokens a group of 256
# tokens takes 1.1 to 1.7 times as long as one of 128. Pages of 64 are for long rows: at 16k tokens a group of 512 takes
# 0.8 times as long as one of 128.
GROUP_PAGES = 8
LEAST_TOKENS, MOST_TOKENS = 128, 512
# Measured likewise, one and four slots of 8k to 32k tokens: two groups of 1,024 tokens at a time take 0.6 to 0.9 of the
# time of groups of 128 with one row per slot, 0.5 to 0.65 with five or nine.
NEAR_TOKENS, FAR_TOKENS = 4096, 1024
# Measured likewise: at smaller head dims products of bfloat16 are cheap enough to double them and gather once.
SPLIT_DIM = 128
# Measured likewise: 32 rows of 8 to 388 tokens, 151 in the mean, take 0.6 of the time in tiles of 8.
ROWS_TOGETHER = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the list is walked.

    group: list entries per loop step, the same for every batch, count and list length.
    joint: gather entire tokens and pad the query with zeros for the value: twice the
        products, but one copy of the token. Otherwise keys and values are gathered separately.
    rows: slots walked together, with similar list lengths; None is all of them, for a parallel device.
    near: list entries processed in groups of `group`, a multiple of it; None is all of them.
    far: list entries per group of the later ones, which are processed slot by slot, `NUM_SPLITS` groups at a time.
    """

    group: int
    joint: bool
    rows: int | None = None
    near: int | None = None
    far: int | None = None

    def __post_init__(self) -> None:
        require_counts(self)


def heuristic(page_size: int, head_dim: int, dtype: jnp.dtype, platform: str, rows: int = 1) -> Config:
    """Return the walk for a page size in tokens, a head dim, the products' dtype, a platform and the rows per slot."""
    cheap = dtype == jnp.bfloat16 and head_dim < SPLIT_DIM and rows == 1  # with more queries copies are cheaper
    group = max(1, LEAST_TOKENS // page_size, min(GROUP_PAGES, MOST_TOKENS // page_size))
    on_cpu = platform == "cpu"
    return Config(
        group=group,
        # a gather of some columns makes XLA copy the pool on a TPU
        joint=cheap or platform == "tpu",
        rows=ROWS_TOGETHER if on_cpu else None,
        near=group * max(1, NEAR_TOKENS // (group * page_size)) if on_cpu else None,
        far=max(1, FAR_TOKENS // page_size) if on_cpu else None,
    )


def workspace(
    *, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: DTypeLike
) -> Workspace:
    """Return what `api.workspace` documents."""
    walk = heuristic(page_size, head_dim, jnp.dtype(dtype), platform())
    walked = min(rows, walk.rows or rows) * walk.group * page_size
    if walk.far is not None:
        walked = max(walked, min(rows, NUM_SPLITS) * walk.far * page_size)
    width = padded_width(head_dim) if walk.joint else 2 * head_dim
    return Workspace(scores=4 * 2 * walked * num_heads, gathered=4 * walked * num_kv_heads * width)


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
    config: Config | None = None,
) -> tuple[Float[Array, "r h d"], Float[Array, "r h m"]]:
    """Return what `api.paged_attention` documents."""
    _, h, d = q.shape
    k, _, s, _ = pages.shape
    r = rows_per_slot if h > k else 1  # a single query uses other multiply instructions than two
    page_table, blocks, counts, readers = split(rows_per_slot, r, page_table, blocks, counts, readers=readers)
    b = page_table.shape[0]
    dtype = q.dtype if kv_scales is not None else wider(q.dtype, pages.dtype)
    if config is None:
        by_rule = heuristic(s, d, dtype, platform(), r)
        facts = {"page_size": s, "head_dim": d, "queries": h // k, "dtype": pages.dtype}
        config = tuned.settings(by_rule, "paged_attention/xla", **facts)
    walk = partial(
        _walk,
        pages=pages,
        config=config,
        dtype=dtype,
        softmax=softmax,
        kv_scales=kv_scales,
    )
    single = h == k  # a single query is walked with other rows, as above
    m, g = blocks.shape[2], h // k
    near = m if config.near is None or config.far is None or single else min(config.near, m)
    full = config.joint and r == 1
    slots = Slots(
        query=q.reshape(b, r, h, d),
        page_table=page_table,
        blocks=blocks[..., :near],
        counts=jnp.minimum(counts, near),
        readers=None if readers is None else readers[..., :near],
        lengths=lengths.reshape(b, r),
        running=begun((b, k, r, g, pages.shape[3] if full else d), softmax.sink_logits),
    )

    def together(slots: Slots) -> tuple[Running, Float[Array, "b k r g m"]]:
        return walk(slots, group=config.group)

    def by_length(slots: Slots) -> tuple[Running, Float[Array, "b k r g m"]]:
        return apart_or_together(together, slots.longest, slots)

    size = b if config.rows is None else max(1, config.rows // r)
    one_way = config.rows is None or size == 1 or single
    running, block_lse = in_tiles(together if one_way else by_length, size, slots.longest, slots)
    if near < m:
        behind = dataclasses.replace(
            slots,
            blocks=blocks[..., near:],
            counts=jnp.maximum(counts - near, 0),
            readers=None if readers is None else readers[..., near:],
            running=running,
        )

        def far(slots: Slots) -> tuple[Running, Float[Array, "b k r g m"]]:
            return lax.map(partial(in_splits, partial(walk, group=config.far), config.far), slots)

        def nothing(slots: Slots) -> tuple[Running, Float[Array, "b k r g m"]]:
            return slots.running, jnp.full((*block_lse.shape[:-1], m - near), -jnp.inf, block_lse.dtype)

        running, more = lax.cond(jnp.max(behind.counts) > 0, far, nothing, behind)
        block_lse = jnp.concatenate([block_lse, more], axis=-1)

    mixed = running.mixed[..., d : 2 * d] if full else running.mixed
    out = mixed / jnp.where(running.total == 0.0, 1.0, running.total)[..., None]
    out, block_lse = (found.swapaxes(1, 2).reshape(b * r, h, -1) for found in (out, block_lse))
    return out.astype(q.dtype), block_lse


def _walk(
    slots: Slots,
    *,
    group: int,
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    config: Config,
    dtype: jnp.dtype,
    softmax: Softmax,
    kv_scales: Float[Array, "k p 2 s"] | None,
) -> tuple[Running, Float[Array, "b k r g m"]]:
    """Return the softmax state of slots after a walk over further entries, with products in `dtype`."""
    page_table, blocks, counts, readers, lengths = (
        slots.page_table,
        slots.blocks,
        slots.counts,
        slots.readers,
        slots.lengths,
    )
    b, r, h, d = slots.query.shape
    k, p, s, e = pages.shape
    m, x, g = blocks.shape[2], b * r * k, h // k
    width = slots.running.mixed.shape[-1]
    full = config.joint and r == 1
    # the rows of a slot are adjacent under each KV head, as in the products
    query = slots.query.astype(dtype).reshape(b, r, k, g, d).swapaxes(1, 2)
    query = jnp.pad(query.reshape(x, g, d), ((0, 0), (0, 0), (0, width - d)))
    padding = -m % group
    blocks, readers = jax.tree.map(lambda ids: jnp.pad(ids, ((0, 0), (0, 0), (0, padding))), (blocks, readers))
    offset = jnp.arange(s, dtype=jnp.int32)
    # on a CPU a product is bitwise independent of the other rows of a slot only in bfloat16
    together = r if dtype == jnp.bfloat16 else 1

    def listed_tokens(step):
        """Return the pool rows of a group's pages, and the mask of their tokens that every query attends to."""
        ids = lax.dynamic_slice_in_dim(blocks, step * group, group, axis=2)
        listed = step * group + jnp.arange(group, dtype=jnp.int32) < counts[..., None]
        ids = jnp.where(listed, ids, 0)
        reads = listed[:, :, None]
        if readers is not None:
            bits = lax.dynamic_slice_in_dim(readers, step * group, group, axis=2)
            reads &= (bits[:, :, None] >> jnp.arange(r, dtype=jnp.int32)[:, None]) & 1 == 1
        end = jnp.where(reads, lengths[:, None, :, None] - ids[:, :, None] * s, 0).reshape(x, group, 1)
        # the barriers keep XLA from computing these again for every element of the gathers
        rows, end = lax.optimization_barrier((page_rows(page_table, ids, p), end))
        seen_mask = offset < end
        if softmax.window is not None:
            seen_mask &= offset >= end - softmax.window
        return rows, lax.optimization_barrier(seen_mask)

    def read(rows, seen_mask):
        """Return keys and values of a group; values that no row of a slot attends to are 0, because 0 * NaN is NaN."""

        def clean(token, of_padding=False):
            if kv_scales is not None:  # 8 bits are finite
                return token
            visible = jnp.any(seen_mask.reshape(b * k, r, group * s, 1), axis=1)
            if of_padding:
                visible = visible & (jnp.arange(e, dtype=jnp.int32) < 2 * d)
            return jnp.where(visible, token, jnp.zeros((), dtype))

        if config.joint:
            token = clean(tokens(pages, rows, 0, e).astype(dtype), of_padding=e > 2 * d)
            token = lax.optimization_barrier(token)
            return (token, token) if full else tuple(lax.optimization_barrier((token[..., :d], token[..., d : 2 * d])))
        key, value = (tokens(pages, rows, start, d).astype(dtype) for start in (0, d))
        key_value = key, clean(value)
        # for several rows XLA takes a tenth less if they are stored first, in bfloat16
        return lax.optimization_barrier(key_value) if r > 1 else key_value

    def for_each_row(scale):
        """Return the scales "b*k m s" of the tokens of a slot, for each of its rows: "x m s"."""
        return jnp.broadcast_to(scale.reshape(b, k, 1, group, s), (b, k, r, group, s)).reshape(x, group, s)

    def by_slot(product, rows):
        """Return the product "y q n" of every row's "x g n", computed for `together` rows of a slot at once."""
        if r == 1:
            return product(rows)
        rows = lax.optimization_barrier(rows).reshape(b * k, r * g, -1)
        parts = [product(rows[:, i : i + together * g]) for i in range(0, r * g, together * g)]
        return lax.optimization_barrier(jnp.concatenate(parts, axis=1).reshape(x, g, -1))

    def scored(key, query):
        """Return queries times keys: in float32 XLA is faster with the keys, the larger operand, first."""
        if dtype == jnp.float32 and not config.joint:
            scores = jnp.einsum("xtd,xgd->xtg", key, query, preferred_element_type=jnp.float32)
            return lax.optimization_barrier(scores).swapaxes(1, 2)
        return jnp.einsum("xgd,xtd->xgt", query, key, preferred_element_type=jnp.float32)

    def mixture(value, weights):
        return jnp.einsum("xgt,xtd->xgd", weights, value, preferred_element_type=jnp.float32)

    def step(i, carry):
        maximum, total, mixed, block_lse = carry
        rows, seen_mask = listed_tokens(i)
        key, value = read(rows, seen_mask)
        scores = by_slot(partial(scored, key), query) * softmax.scale
        if kv_scales is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
            key_scale, value_scale = map(for_each_row, token_scales(kv_scales, rows))
            scores = scores * key_scale.reshape(x, 1, group * s)
        scores = softmax.capped(scores)
        scores = jnp.where(seen_mask[:, None], scores.reshape(x, g, group, s), -jnp.inf)

        # one exponential per token, relative to its own block's maximum, gives the block's sum and the output
        scores = lax.optimization_barrier(scores)
        block_maximum = lax.optimization_barrier(jnp.max(scores, axis=-1))
        new_maximum = jnp.maximum(maximum, jnp.max(block_maximum, axis=-1))
        weights = jnp.exp(scores - finite(block_maximum)[..., None])
        # a separate sum, or the compiler merges it into the total and rounds differently if block_lse is unused
        block_total = lax.optimization_barrier(sums.total(weights))
        lse = finite(block_maximum) + jnp.log(block_total)
        block_lse = lax.dynamic_update_slice_in_dim(block_lse, lse, i * group, axis=2)

        # XLA rounds the exponential of an unmaterialised difference differently with more rows
        below = (block_maximum - finite(new_maximum)[..., None], maximum - finite(new_maximum))
        block_weight, decay = (jnp.exp(each) for each in lax.optimization_barrier(below))
        total = total * decay + sums.total(block_total * block_weight)
        weights = weights * block_weight[..., None]
        if kv_scales is not None:
            weights = jnp.where(seen_mask[:, None], weights * value_scale[:, None], 0.0)  # 0 * NaN is NaN
        weights = weights.reshape(x, g, group * s).astype(dtype)
        update = by_slot(partial(mixture, value), weights)
        return new_maximum, total, mixed * decay[..., None] + update, block_lse

    before = (
        one.reshape(x, *one.shape[3:]) for one in (slots.running.maximum, slots.running.total, slots.running.mixed)
    )
    block_lse = jnp.full((x, g, m + padding), -jnp.inf, jnp.float32)
    steps = (jnp.minimum(jnp.max(counts), m) + group - 1) // group
    maximum, total, mixed, block_lse = (
        found.reshape(b, k, r, *found.shape[1:]) for found in lax.fori_loop(0, steps, step, (*before, block_lse))
    )
    return Running(maximum=maximum, total=total, mixed=mixed), block_lse[..., :m]

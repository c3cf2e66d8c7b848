"""`paged_attention` without Pallas: the lists of all slots and KV heads are cut into pieces, which wait in one queue.

A step of the loop takes some pieces from the queue, of whichever lists they are, so its cost is that of the listed
blocks, however uneven the lists. Every piece gives a softmax state of its own, and the states of a list are merged in
the list's order, a round of pieces at a time. A piece follows from its place in its list, and on a CPU no shape within
the loop depends on the batch: so a row is summed in the same order, by the same instructions, in any batch.

Rows of one slot share the gathered tokens. Everything between gather and products is computed row by row, in arrays of
the shape of as many slots of one row: XLA rounds an exponential differently in another shape.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax import sums
from et_jax.pallas import tuned
from et_jax.pallas.backend import platform
from et_jax.pallas.checks import padded_width, require_counts, wider
from et_jax.pallas.folding import split
from et_jax.pallas.gather import token_scales, tokens
from et_jax.pallas.workspace import Workspace
from et_jax.softmax import Softmax, finite
from et_jax.types import pytree

# Measured on x86-64 with two cores. Small pages are for short rows: at 16 rows of 64 tokens a piece of 256
# tokens takes 1.1 to 1.7 times as long as one of 128. Pages of 64 are for long rows: at 16k tokens a piece of 512 takes
# 0.8 times as long as one of 128.
GROUP_PAGES = 8
LEAST_TOKENS, MOST_TOKENS = 128, 512
# Measured likewise: at smaller head dims products of bfloat16 are cheap enough to double them and gather once.
SPLIT_DIM = 128
# Measured likewise, 1 to 64 slots of 200 to 8k tokens, 1 to 8 KV heads of 64 to 256: 24 pieces of 32 or 64 KiB take 0.8
# to 1.0 of the time of 16; 24 of 128 KiB take 1.3 times as long.
MOST_PIECES, STEP_BYTES = 24, 2 * 1024 * 1024
LOG_2_HIGH = 0.693359375  # nine bits: times a whole number below 2^15 it is exact
LOG_2_LOW = math.log(2.0) - LOG_2_HIGH
ROUND, CHUNK = 16, 4  # pieces of a list that wait for their merger, and that are merged at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How lists are walked.

    group: list entries per piece, the same for every batch, count and list length.
    joint: gather entire tokens and pad the query with zeros for the value: twice the
        products, but one copy of the token. Otherwise keys and values are gathered separately.
    pieces: pieces per step of the loop, while as many are left, then one at a time; None is one for each list, for a
        parallel device.
    """

    group: int
    joint: bool
    pieces: int | None = None

    def __post_init__(self) -> None:
        require_counts(self)


def heuristic(page_size: int, head_dim: int, dtype: jnp.dtype, platform: str, rows: int = 1) -> Config:
    """Return the walk for a page size in tokens, a head dim, the products' dtype, a platform and the rows per slot."""
    cheap = dtype == jnp.bfloat16 and head_dim < SPLIT_DIM and rows == 1  # with more queries copies are cheaper
    group = max(1, LEAST_TOKENS // page_size, min(GROUP_PAGES, MOST_TOKENS // page_size))
    piece_bytes = group * page_size * 2 * head_dim * dtype.itemsize
    return Config(
        group=group,
        # a gather of some columns makes XLA copy the pool on a TPU
        joint=cheap or platform == "tpu",
        pieces=max(1, min(MOST_PIECES, STEP_BYTES // piece_bytes)) if platform == "cpu" else None,
    )


def workspace(
    *, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: DTypeLike
) -> Workspace:
    """Return what `api.workspace` documents."""
    walk = heuristic(page_size, head_dim, jnp.dtype(dtype), platform())
    tokens = (walk.pieces or rows * num_kv_heads) * walk.group * page_size
    width = padded_width(head_dim) if walk.joint else 2 * head_dim
    states = 4 * rows * num_heads * ROUND * (2 + walk.group + head_dim)
    return Workspace(scores=4 * 2 * tokens * (num_heads // num_kv_heads) + states, gathered=4 * tokens * width)


@pytree
class State:
    """The softmax state of queries: the sum and the mixed values, both relative to 2 to the `exponent`."""

    exponent: Float[Array, "*x g"]
    total: Float[Array, "*x g"]
    mixed: Float[Array, "*x g d"]


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
    k, p, s, e = pages.shape
    r = rows_per_slot if h > k else 1  # a single query uses other multiply instructions than two
    page_table, blocks, counts, readers = split(rows_per_slot, r, page_table, blocks, counts, readers=readers)
    b, m, g = len(page_table), blocks.shape[2], h // k
    lists = b * k
    dtype = q.dtype if kv_scales is not None else wider(q.dtype, pages.dtype)
    if config is None:
        by_rule = heuristic(s, d, dtype, platform(), r)
        facts = {"page_size": s, "head_dim": d, "queries": g, "dtype": pages.dtype}
        config = tuned.settings(by_rule, "paged_attention/xla", **facts)
    group, taken = config.group, config.pieces or lists
    room = min(ROUND, -(-m // (group * CHUNK)) * CHUNK)

    padding = -m % (group * room)
    by_list = [blocks] if readers is None else [blocks, readers]
    by_list = [jnp.pad(ids.reshape(lists, m), ((0, 0), (0, padding))).reshape(lists, -1, group) for ids in by_list]
    counts = jnp.minimum(counts, m).reshape(lists)
    number = (counts + group - 1) // group  # of pieces
    query = q.reshape(b, r, k, g, d).swapaxes(1, 2).astype(dtype).reshape(lists, r, g, d)
    if config.joint and r == 1:
        query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, e - d)))
    slot, head = jnp.arange(lists, dtype=jnp.int32) // k, jnp.arange(lists, dtype=jnp.int32) % k
    rows_of = jnp.repeat(lengths.reshape(b, r), k, axis=0)
    row = jnp.tile(jnp.arange(r, dtype=jnp.int32), lists)[:, None]
    piece = partial(
        _piece,
        pages=pages,
        page_table=page_table,
        config=config,
        dtype=dtype,
        softmax=softmax,
        head_dim=d,
        kv_scales=kv_scales,
    )

    def one_round(i: Int[Array, ""], found: tuple[State, Array]) -> tuple[State, Array]:
        first = i * room
        waiting = jnp.clip(number - first, 0, room)
        end = jnp.cumsum(waiting, dtype=jnp.int32)
        begin = end - waiting
        facts = jnp.concatenate([jnp.stack([begin, counts, slot, head * p], axis=1), rows_of], axis=1)
        facts = lax.optimization_barrier(facts)

        def step(taken: int, start: Int[Array, ""], j: Int[Array, ""], done: tuple[Array, Array]) -> tuple[Array, ...]:
            start = start + j * taken
            place = start + jnp.arange(taken, dtype=jnp.int32)
            # the list of each piece: past the end of the queue, the last one once more
            own = lax.optimization_barrier(jnp.sum(place[:, None] >= end[:-1], axis=1, dtype=jnp.int32))
            known = lax.optimization_barrier(facts[own])
            nth = first + jnp.minimum(place - known[:, 0], room - 1)
            listed = known[:, 1] - nth * group
            ids = [each[own, nth] for each in by_list]
            some = piece(query[own], known[:, 2], known[:, 3], known[:, 4:], listed, *ids)
            return jax.tree.map(
                lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, start, axis=0), done, some
            )

        spaces = -(-lists * room // taken) * taken
        blank = tuple(jnp.zeros((spaces, r, g, width), jnp.float32) for width in (2 + group, d))
        if config.pieces is None:
            done = lax.fori_loop(0, (end[-1] + taken - 1) // taken, partial(step, taken, jnp.int32(0)), blank)
        else:
            done = lax.fori_loop(0, end[-1] // taken, partial(step, taken, jnp.int32(0)), blank)
            start = end[-1] // taken * taken
            done = lax.fori_loop(0, end[-1] - start, partial(step, 1, start), done)

        def merge(c: Int[Array, ""], found: tuple[State, Array]) -> tuple[State, Array]:
            running, block_lse = found
            nth = c * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
            at, there = (jnp.repeat(x, r, axis=0) for x in (begin[:, None] + nth, nth < waiting[:, None]))
            there = there[..., None]
            # "x n g" of each row x of a slot, so that exponentials have the shape of as many slots of one row
            logs, mixed = (x.at[at, row].get(mode="clip") for x in done)
            lse = jnp.where(there[..., None], logs[..., 2:], -jnp.inf)
            lse = lse.swapaxes(1, 2).reshape(lists * r, g, CHUNK * group)
            states = State(
                exponent=jnp.where(there, logs[..., 0], -jnp.inf),
                total=jnp.where(there, logs[..., 1], 0.0),
                mixed=jnp.where(there[..., None], mixed, 0.0),  # another list's may be NaN
            )
            running = _merged(running, states)
            return running, lax.dynamic_update_slice_in_dim(block_lse, lse, (first + c * CHUNK) * group, axis=2)

        return lax.fori_loop(0, (jnp.max(waiting) + CHUNK - 1) // CHUNK, merge, found)

    exponent = jnp.full((lists * r, g), -jnp.inf, jnp.float32)
    total = jnp.zeros_like(exponent)
    if softmax.sink_logits is not None:  # a sink is one more logit without a value
        sinks = softmax.sink_logits.astype(jnp.float32).reshape(k, 1, g)
        sinks = jnp.broadcast_to(sinks, (b, k, r, g)).reshape(lists * r, g)
        exponent = _exponent(sinks)
        total = jnp.exp(_below(sinks, exponent))
    begun = State(exponent=exponent, total=total, mixed=jnp.zeros((lists * r, g, d), jnp.float32))
    block_lse = jnp.full((lists * r, g, m + padding), -jnp.inf, jnp.float32)
    running, block_lse = lax.fori_loop(0, (jnp.max(number) + room - 1) // room, one_round, (begun, block_lse))
    out = running.mixed / jnp.where(running.total == 0.0, 1.0, running.total)[..., None]
    out, block_lse = (x.reshape(b, k, r, g, -1).swapaxes(1, 2).reshape(b * r, h, -1) for x in (out, block_lse[..., :m]))
    return out.astype(q.dtype), block_lse


def _merged(running: State, states: State) -> State:
    """Return the state "x g" of the rows of lists after further pieces, "x n g".

    All weights are powers of two, so products are exact: in a small loop LLVM may round a product and the sum that it
    goes into at once.
    """
    exponent = jnp.maximum(running.exponent, jnp.max(states.exponent, axis=1))
    decay, weights = _power(running.exponent - finite(exponent)), _power(states.exponent - finite(exponent)[:, None])
    mixed = sums.total(states.mixed * weights[..., None], axis=1)
    return State(
        exponent=exponent,
        total=running.total * decay + sums.total(states.total * weights, axis=1),
        mixed=running.mixed * decay[..., None] + mixed,
    )


def _power(exponent: Float[Array, "*x"]) -> Float[Array, "*x"]:
    """Return 2 to the power of whole numbers of at most 0, exactly; 0 below -126."""
    bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def _exponent(maximum: Float[Array, "*x"]) -> Float[Array, "*x"]:
    """Return the whole number of powers of two that holds e to the maximum; minus infinity for minus infinity."""
    return jnp.ceil(maximum * (1.0 / math.log(2.0)))


def _below(x: Float[Array, "*x"], exponent: Float[Array, "*#x"]) -> Float[Array, "*x"]:
    """Return x - log(2) exponent, rounded as if log(2) were exact; exponents above 16,000 lose accuracy."""
    high, low = lax.optimization_barrier((exponent * LOG_2_HIGH, exponent * LOG_2_LOW))
    return lax.optimization_barrier((x - high) - low)


def _piece(
    query: Float[Array, "x r g w"],
    slot: Int[Array, " x"],
    first_row: Int[Array, " x"],
    lengths: Int[Array, "x r"],
    listed: Int[Array, " x"],
    ids: Int[Array, "x m"],
    bits: Int[Array, "x m"] | None = None,
    *,
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    config: Config,
    dtype: jnp.dtype,
    softmax: Softmax,
    head_dim: int,
    kv_scales: Float[Array, "k p 2 s"] | None,
) -> tuple[Float[Array, "x r g 2+m"], Float[Array, "x r g d"]]:
    """Return the softmax states of pieces: exponent, total and the log-sum-exp of each block, and the mixed values.

    `ids` are the blocks of the pieces, of which the first `listed` count, and `bits` their readers. The pages of a
    piece's KV head begin in the pool, viewed as "k*p s e", at `first_row`.
    """
    (s, e), (x, group), (_, r, g, width) = pages.shape[2:], ids.shape, query.shape
    full, d = config.joint and r == 1, head_dim
    query = query.reshape(x * r, g, width)
    counts = jnp.arange(group, dtype=jnp.int32) < listed[:, None]
    ids = jnp.where(counts, ids, 0)
    reads = counts[:, None]
    if bits is not None:
        reads = reads & ((bits[:, None] >> jnp.arange(r, dtype=jnp.int32)[:, None]) & 1 == 1)
    end = jnp.where(reads, lengths[..., None] - ids[:, None] * s, 0).reshape(x * r, group, 1)
    # the barriers keep XLA from computing these again for every element of the gathers
    rows, end = lax.optimization_barrier((page_table[slot[:, None], ids] + first_row[:, None], end))
    offset = jnp.arange(s, dtype=jnp.int32)
    seen_mask = offset < end
    if softmax.window is not None:
        seen_mask &= offset >= end - softmax.window
    seen_mask = lax.optimization_barrier(seen_mask)
    # on a CPU a product is bitwise independent of the other rows of a slot only in bfloat16
    together = r if dtype == jnp.bfloat16 else 1

    def clean(token: Array, of_padding: bool = False) -> Array:
        """Return tokens of which those that no row of the slot attends to are 0, because 0 * NaN is NaN."""
        if kv_scales is not None:  # 8 bits are finite
            return token
        visible = jnp.any(seen_mask.reshape(x, r, group * s, 1), axis=1)
        if of_padding:
            visible = visible & (jnp.arange(e, dtype=jnp.int32) < 2 * d)
        return jnp.where(visible, token, jnp.zeros((), dtype))

    def read() -> tuple[Array, Array]:
        """Return the keys and values of the pieces."""
        if config.joint:
            token = clean(tokens(pages, rows, 0, e).astype(dtype), of_padding=e > 2 * d)
            token = lax.optimization_barrier(token)
            return (token, token) if full else tuple(lax.optimization_barrier((token[..., :d], token[..., d : 2 * d])))
        key, value = (tokens(pages, rows, start, d).astype(dtype) for start in (0, d))
        key_value = key, clean(value)
        # for several rows XLA takes a tenth less if they are stored first, in bfloat16
        return lax.optimization_barrier(key_value) if r > 1 else key_value

    def for_each_row(scale: Array) -> Array:
        """Return the scales "x m s" of the tokens of a piece, for each row of its slot: "x*r m s"."""
        return jnp.broadcast_to(scale[:, None], (x, r, group, s)).reshape(x * r, group, s)

    def by_slot(product: Callable[[Array], Array], rows: Array) -> Array:
        """Return the product "y q n" of every row's "x*r g n", computed for `together` rows of a slot at once."""
        if r == 1:
            return product(rows)
        rows = lax.optimization_barrier(rows).reshape(x, r * g, -1)
        parts = [product(rows[:, i : i + together * g]) for i in range(0, r * g, together * g)]
        return lax.optimization_barrier(jnp.concatenate(parts, axis=1).reshape(x * r, g, -1))

    key, value = read()

    def scored(query: Array) -> Array:
        """Return queries times keys: in float32 XLA is faster with the keys, the larger operand, first."""
        if dtype == jnp.float32 and not config.joint:
            scores = jnp.einsum("xtd,xgd->xtg", key, query, preferred_element_type=jnp.float32)
            return lax.optimization_barrier(scores).swapaxes(1, 2)
        return jnp.einsum("xgd,xtd->xgt", query, key, preferred_element_type=jnp.float32)

    def mixture(weights: Array) -> Array:
        return jnp.einsum("xgt,xtd->xgd", weights, value, preferred_element_type=jnp.float32)

    scores = by_slot(scored, query) * softmax.scale
    value_scale = None
    if kv_scales is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
        key_scale, value_scale = map(for_each_row, token_scales(kv_scales, rows))
        scores = scores * key_scale.reshape(x * r, 1, group * s)
    scores = softmax.capped(scores)
    scores = jnp.where(seen_mask[:, None], scores.reshape(x * r, g, group, s), -jnp.inf)

    # one exponential per token, relative to its own block's maximum, gives the block's sum and the output
    scores = lax.optimization_barrier(scores)
    block_maximum = lax.optimization_barrier(jnp.max(scores, axis=-1))
    exponent = _exponent(jnp.max(block_maximum, axis=-1))
    weights = jnp.exp(scores - finite(block_maximum)[..., None])
    # a separate sum, or the compiler merges it into the total and rounds differently if block_lse is unused
    block_total = lax.optimization_barrier(sums.total(weights))
    block_lse = finite(block_maximum) + jnp.log(block_total)

    block_weight = jnp.exp(_below(block_maximum, finite(exponent)[..., None]))
    total = sums.total(block_total * block_weight)
    weights = weights * block_weight[..., None]
    if value_scale is not None:
        weights = jnp.where(seen_mask[:, None], weights * value_scale[:, None], 0.0)  # 0 * NaN is NaN
    weights = weights.reshape(x * r, g, group * s).astype(dtype)
    mixed = by_slot(mixture, weights)
    if full:
        mixed = mixed[..., d : 2 * d]
    logs = jnp.concatenate([exponent[..., None], total[..., None], block_lse], axis=-1)
    return logs.reshape(x, r, g, -1), mixed.reshape(x, r, g, d)

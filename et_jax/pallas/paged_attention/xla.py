"""`paged_attention` without Pallas: the lists of all slots and KV heads are cut into pieces, which wait in one queue.

A step of the loop takes some pieces from the queue, of whichever lists they are, so its cost is that of the listed
blocks, however uneven the lists. Every piece gives a softmax state of its own, and the states of a list are merged in
the list's order, a round of pieces at a time. A piece follows from its place in its list, and on a CPU no shape within
the loop depends on the batch: so a row is summed in the same order, by the same instructions, in any batch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import tuned
from et_jax.pallas.backend import platform
from et_jax.pallas.checks import padded_width, require_counts, wider
from et_jax.pallas.folding import split
from et_jax.pallas.paged_attention.pieces import State, attend, begun, merged
from et_jax.pallas.workspace import Workspace
from et_jax.softmax import Softmax
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
class Lists:
    """The lists of blocks of every slot and KV head, cut into n pieces of m entries, with the slots' queries.

    `facts` has the entries of each list, its slot, the row at which its KV head's pages begin in the pool, viewed as
    "k*p s e", and the lengths of the slot's rows.
    """

    query: Float[Array, "l r g w"]
    ids: Int[Array, "l n m"]
    readers: Int[Array, "l n m"] | None
    facts: Int[Array, "l 3+r"]


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
    dtype = q.dtype if kv_scales is not None else wider(q.dtype, pages.dtype)
    if config is None:
        by_rule = heuristic(s, d, dtype, platform(), r)
        facts = {"page_size": s, "head_dim": d, "queries": g, "dtype": pages.dtype}
        config = tuned.settings(by_rule, "paged_attention/xla", **facts)
    group, joint = config.group, config.joint
    room = min(ROUND, -(-m // (group * CHUNK)) * CHUNK)

    def in_pieces(ids: Int[Array, "b k _"]) -> Int[Array, "l n _"]:
        padded = jnp.pad(ids.reshape(b * k, m), ((0, 0), (0, -m % (group * room))))
        return padded.reshape(b * k, -1, group)

    query = q.reshape(b, r, k, g, d).swapaxes(1, 2).astype(dtype).reshape(b * k, r, g, d)
    if joint and r == 1:
        query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, e - d)))
    one = jnp.arange(b * k, dtype=jnp.int32)
    facts = jnp.stack([jnp.minimum(counts, m).reshape(b * k), one // k, one % k * p], axis=1)
    lists = Lists(
        query=query,
        ids=in_pieces(blocks),
        readers=None if readers is None else in_pieces(readers),
        facts=jnp.concatenate([facts, jnp.repeat(lengths.reshape(b, r), k, axis=0)], axis=1),
    )
    given = {"pages": pages, "page_table": page_table, "kv_scales": kv_scales, "head_dim": d}
    attended = partial(attend, **given, dtype=dtype, joint=joint, softmax=softmax)

    def one_round(i: Int[Array, ""], found: tuple[State, Array]) -> tuple[State, Array]:
        return _round(lists, i * room, room, config.pieces, attended, d, found)

    sinks = softmax.sink_logits
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(k, 1, g), (b, k, r, g)).reshape(-1, g)
    block_lse = jnp.full((b * k * r, g, lists.ids.shape[1] * group), -jnp.inf, jnp.float32)
    rounds = (jnp.max(facts[:, 0], initial=0) + room * group - 1) // (room * group)
    state, block_lse = lax.fori_loop(0, rounds, one_round, (begun(b * k * r, g, d, sinks), block_lse))
    out = state.mixed / jnp.where(state.total == 0.0, 1.0, state.total)[..., None]
    out, block_lse = (x.reshape(b, k, r, g, -1).swapaxes(1, 2).reshape(b * r, h, -1) for x in (out, block_lse[..., :m]))
    return out.astype(q.dtype), block_lse


def _round(
    lists: Lists,
    first: Int[Array, ""],
    room: int,
    pieces: int | None,
    attended: Callable[..., tuple[Array, Array]],
    head_dim: int,
    found: tuple[State, Float[Array, "x g m"]],
) -> tuple[State, Float[Array, "x g m"]]:
    """Return the softmax state of every row, and the log-sum-exp of each block, after `room` more pieces of each list.

    `first` is the place of the first of them. `pieces` is as in `Config`, `attended` is `attend` of these pages.
    """
    (num_lists, r, g, _), group = lists.query.shape, lists.ids.shape[2]
    waiting = jnp.clip((lists.facts[:, 0] + group - 1) // group - first, 0, room)
    end = jnp.cumsum(waiting, dtype=jnp.int32)
    begin = end - waiting
    facts = lax.optimization_barrier(jnp.concatenate([begin[:, None], lists.facts], axis=1))

    def step(taken: int, start: Int[Array, ""], i: Int[Array, ""], done: tuple[Array, Array]) -> tuple[Array, Array]:
        """Take some pieces from the queue."""
        start = start + i * taken
        place = start + jnp.arange(taken, dtype=jnp.int32)
        # the list of each piece: past the end of the queue, the last one once more
        own = lax.optimization_barrier(jnp.sum(place[:, None] >= end[:-1], axis=1, dtype=jnp.int32))
        before, count, slot, first_row, *_ = known = lax.optimization_barrier(facts[own]).T
        nth = first + jnp.minimum(place - before, room - 1)
        ids, readers = (None if each is None else each[own, nth] for each in (lists.ids, lists.readers))
        some = attended(lists.query[own], slot, first_row, known[4:].T, count - nth * group, ids, readers)
        return jax.tree.map(lambda every, some: lax.dynamic_update_slice_in_dim(every, some, start, axis=0), done, some)

    taken = pieces or num_lists
    places = -(-num_lists * room // taken) * taken
    done = tuple(jnp.zeros((places, r, g, width), jnp.float32) for width in (2 + group, head_dim))
    if pieces is None:
        done = lax.fori_loop(0, (end[-1] + taken - 1) // taken, partial(step, taken, jnp.int32(0)), done)
    else:
        done = lax.fori_loop(0, end[-1] // taken, partial(step, taken, jnp.int32(0)), done)
        left = end[-1] % taken
        done = lax.fori_loop(0, left, partial(step, 1, end[-1] - left), done)
    row = jnp.tile(jnp.arange(r, dtype=jnp.int32), num_lists)[:, None]

    def merge(i: Int[Array, ""], found: tuple[State, Array]) -> tuple[State, Array]:
        """Merge the states of some pieces of every list."""
        nth = i * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        at, there = (jnp.repeat(x, r, axis=0) for x in (begin[:, None] + nth, nth < waiting[:, None]))
        logs, mixed = (x.at[at, row].get(mode="clip") for x in done)
        logs = jnp.where(there[..., None, None], logs, -jnp.inf)
        states = State(
            exponent=logs[..., 0],
            total=jnp.maximum(logs[..., 1], 0.0),
            mixed=jnp.where(there[..., None, None], mixed, 0.0),  # another list's may be NaN
        )
        lse = logs[..., 2:].swapaxes(1, 2).reshape(num_lists * r, g, CHUNK * group)
        state, block_lse = found
        start = (first + i * CHUNK) * group
        return merged(state, states), lax.dynamic_update_slice_in_dim(block_lse, lse, start, axis=2)

    return lax.fori_loop(0, (jnp.max(waiting) + CHUNK - 1) // CHUNK, merge, found)

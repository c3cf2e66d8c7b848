"""Choosing blocks over the cache: a selector asked for every row and KV head, and what its answer is worth.

Selectors see one sequence's blocks (`control.view.BlockView`); the cache holds pages. This is where the
one is made of the other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control import bounds
from et_jax.control.base import pack_blocks, unpack_blocks
from et_jax.control.bounds import Interval
from et_jax.control.selector import Selection, Selector, selection
from et_jax.control.view import BlockView, attention_entropy
from et_jax.decode.cache import LayerCache, empty, summary_of
from et_jax.decode.eight_bits import scaled
from et_jax.models.config import ModelShape
from et_jax.pallas.backend import platform
from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.pallas.per_head import Listed, Pages, PerHead, PerQuery, PerRow, Placed, per_head
from et_jax.softmax import capped, with_sink
from et_jax.sums import log_sum_exp, softmax, total
from et_jax.types import pytree, replace, static

_PIECE = 32  # blocks whose mean values are gathered at once on a CPU


@pytree
class Extent:
    """The blocks of sequences: which positions they hold, and which of them a query may and must see.

    `num_tokens` counts a block's tokens, 0 where a sliding window of the layer hides any of them. `readable` blocks
    hold a token the query sees; `certain` ones are read whatever a selector says: the newest, and the one a window
    cuts.
    """

    start: Int[Array, " n"]
    num_tokens: Int[Array, "*b n"]
    readable: Bool[Array, "*b n"]
    certain: Bool[Array, "*b n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What a layer's blocks depend on: the tokens of a page, and the window and soft cap of its softmax."""

    page_size: int
    window: int | None
    soft_cap: float | None = None

    def extent(self, length: Int[Array, "*b"], num_blocks: int) -> Extent:
        """Return the blocks of sequences whose query stands at position `length - 1`."""
        start = jnp.arange(num_blocks, dtype=jnp.int32) * self.page_size
        block, length = jnp.arange(num_blocks), length[..., None]
        held = held_blocks(length, self.page_size)
        readable = (block >= first_block(length, self.page_size, self.window)) & (block < held)
        hidden = jnp.zeros_like(readable) if self.window is None else start < length - self.window
        return Extent(
            start=start,
            num_tokens=jnp.where(hidden, 0, jnp.clip(length - start, 0, self.page_size)),
            readable=readable,
            certain=readable & ((block == held - 1) | hidden),
        )


@pytree
class Blocks(Extent):
    """The blocks of rows: `table` gives their pages, `length` the tokens of a row."""

    table: Int[Array, "b n"]
    length: Int[Array, " b"]

    @property
    def most_held(self) -> Int[Array, ""]:
        """How many blocks the longest row holds."""
        return jnp.max(jnp.where(self.readable, jnp.arange(1, self.readable.shape[1] + 1), 0), initial=0)


def widened(table: Int[Array, "b n"]) -> Int[Array, "b m"]:
    """Return page tables with the null page up to a power of two on a GPU, whose kernels have no other sizes."""
    if platform() != "gpu":
        return table
    num_blocks = table.shape[1]
    return jnp.pad(table, ((0, 0), (0, max(32, 1 << (num_blocks - 1).bit_length()) - num_blocks)))


def held_blocks(length: Int[Array, "*b"], page_size: int) -> Int[Array, "*b"]:
    """Return the blocks that sequences of these lengths hold."""
    return (length + page_size - 1) // page_size


def first_block(length: Int[Array, "*b"], page_size: int, window: int | None) -> Int[Array, "*b"]:
    """Return the first block a query at the last position may see."""
    return jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0) // page_size


def blocks_of(table: Int[Array, "b n"], length: Int[Array, " b"], page_size: int, window: int | None) -> Blocks:
    """Return the blocks of rows whose query stands at position `length - 1`."""
    layer = LayerKind(page_size=page_size, window=window)
    return Blocks(table=table, length=length, **vars(layer.extent(length, table.shape[1])))


@pytree
class Stored:
    """What is known of the blocks of every row and KV head of a layer: inputs of `per_head`, or those of one of them.

    `low`, `high` and `middle` are the scores of every block by its summary, before a soft cap; `coded` is the log of
    its mass by 8-bit keys, `error` how far from the truth that may be. `key` and `value` are those of the page that a
    row ends in, with their scales in a cache of 8 bits. The others are as in `BlockView`.
    """

    query: Any
    low: Any
    high: Any
    middle: Any
    coded: Any
    error: Any
    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    key_min: Any
    key_max: Any
    key_mean: Any
    value_mean: Any
    value_radius: Any
    mean_surprisal: Any
    last_mass: Any
    sensitivity: Any
    length: Any
    tolerance: Any


def stored_of(
    query: Float[Array, "b k g d"],
    cached: LayerCache,
    surprisal: Float[Array, "p s"] | None,
    blocks: Blocks,
    tolerance: Float[Array, " b"],
    backend: str,
    layer: LayerKind,
) -> Stored:
    """Return what selectors go by in one layer, its blocks scored by the kernels that `backend` names.

    `query` is float32 and scaled, `surprisal` that of every cached token. Raises ValueError for a cache without
    summaries.
    """
    k, d, summaries, table = *query.shape[1::2], cached.summaries, blocks.table
    low, high, middle, coded, error = _scores(query, cached, blocks, backend, layer.soft_cap)
    last = jnp.maximum(blocks.length - 1, 0) // cached.pages.shape[2]
    tail = jnp.take_along_axis(table, last[:, None], axis=1)[:, 0]

    def of_pages(pool: Array, first: int) -> Pages:
        return Pages(pool=pool, page=table, columns=(first, first + d))

    scales = (None, None)
    if cached.kv_scales is not None:
        rows = cached.kv_scales[jnp.arange(k)[:, None, None], tail[:, None], jnp.arange(2)].swapaxes(0, 1)
        scales = tuple(PerHead(array=rows[:, :, i]) for i in (0, 1))
    value_mean: Any = of_pages(summaries.mean, d)
    if platform() == "cpu":
        value_mean = PerHead(array=_mean_values(summaries.mean, blocks, d))
    return Stored(
        query=PerQuery(array=query),
        low=PerQuery(array=low),
        high=PerQuery(array=high),
        middle=PerQuery(array=middle),
        coded=None if coded is None else PerQuery(array=coded),
        error=None if error is None else PerQuery(array=error),
        key=Pages(pool=cached.pages, page=tail, columns=(0, d)),
        value=Pages(pool=cached.pages, page=tail, columns=(d, 2 * d)),
        key_scale=scales[0],
        value_scale=scales[1],
        key_min=of_pages(summaries.key_box, 0),
        key_max=of_pages(summaries.key_box, d),
        key_mean=of_pages(summaries.mean, 0),
        value_mean=value_mean,
        value_radius=Pages(pool=summaries.value_radius, page=table),
        mean_surprisal=None if surprisal is None else PerRow(array=_mean_surprisal(surprisal, blocks)),
        last_mass=None,
        sensitivity=None,
        length=PerRow(array=blocks.length),
        tolerance=PerRow(array=tolerance),
    )


def view_of(layer: LayerKind, stored: Stored) -> BlockView:
    """Return what a selector sees of one row and KV head.

    The block that the row ends in is known from its own keys and values up to that end: a page's summary is of all
    that was written to it, by rows that share it too, and after this row's end.
    """
    length, n, page_size, soft_cap = stored.length, stored.middle.shape[-1], layer.page_size, layer.soft_cap
    blocks = layer.extent(length, n)
    at_tail = jnp.arange(n) == jnp.maximum(length - 1, 0) // page_size
    num_tokens = length - jnp.maximum(length - 1, 0) // page_size * page_size
    seen = jnp.arange(page_size) < num_tokens
    key, value = scaled(stored.key, stored.key_scale), scaled(stored.value, stored.value_scale)
    summary = summary_of(key, value, seen)
    tail_score = jnp.einsum("gd,sd->gs", stored.query, key.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    box = bounds.box(stored.query, summary.key_min[None], summary.key_max[None])

    def exact(own: Float[Array, "*x"], kept: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
        there = at_tail.reshape(-1, *[1] * (-1 - axis))
        return jnp.where(there, jnp.expand_dims(own, axis), kept)

    score = Interval(low=exact(box.low[..., 0], stored.low), high=exact(box.high[..., 0], stored.high))
    middle, mean_score = exact(total(stored.query * summary.key_mean), stored.middle), None
    if soft_cap is not None:
        (score, mean_score), middle = bounds.capped_scores(score, middle, soft_cap), capped(middle, soft_cap)
    coded = None
    if stored.coded is not None:
        known = jnp.where(blocks.num_tokens > 0, stored.coded, -jnp.inf)
        coded = Interval(low=known - stored.error, high=known + stored.error)
    surprisal = stored.mean_surprisal
    return BlockView(
        query=stored.query,
        score=score,
        middle=middle,
        key_min=exact(summary.key_min, stored.key_min.astype(jnp.float32), -2),
        key_max=exact(summary.key_max, stored.key_max.astype(jnp.float32), -2),
        key_mean=exact(summary.key_mean, stored.key_mean, -2),
        value_mean=exact(summary.value_mean, stored.value_mean, -2),
        value_radius=exact(summary.value_radius, stored.value_radius),
        start=blocks.start,
        num_tokens=blocks.num_tokens,
        length=length,
        tolerance=stored.tolerance,
        head_tolerance=jnp.broadcast_to(stored.tolerance, stored.query.shape[:1]),
        tail_log_mass=log_sum_exp(jnp.where(seen, capped(tail_score, soft_cap), jnp.finfo(jnp.float32).min)),
        mean_score=mean_score,
        coded=coded,
        mean_surprisal=None if surprisal is None else jnp.where(at_tail, 0.0, surprisal),
        sensitivity=stored.sensitivity,
        last_mass=stored.last_mass,
    )


@pytree
class Chosen:
    """The blocks that every row and KV head reads: packed, and `listed` in ascending order, the first `count` of them.

    `estimate`, `upper` and `shares` are as in `Selection`, `entropy` is that of attention over the estimates, `place`
    that of every block in the list, None where nobody asks for it.
    """

    mask: UInt32[Array, "*b n32"]
    listed: Any
    count: Int[Array, "*b"]
    estimate: Float[Array, "*b g n"]
    upper: Float[Array, "*b g n"] | None
    entropy: Float[Array, "*b g"]
    place: Int[Array, "*b n"] | None
    shares: bool = static(default=False)

    @property
    def opened(self) -> Bool[Array, "*b n"]:
        """Which blocks are read."""
        return unpack_blocks(self.mask)[..., : self.estimate.shape[-1]]


def _mean_values(mean: Float[Array, "k p e"], blocks: Blocks, head_dim: int) -> Float[Array, "b k n d"]:
    """The mean value of every block. On a CPU in pieces up to the longest row, and 0 beyond."""
    b, n = blocks.table.shape
    if platform() != "cpu":
        return _values_of(mean, blocks.table, head_dim)
    m = min(_PIECE, n)

    def step(i: Int[Array, ""], values: Float[Array, "b k n d"]) -> Float[Array, "b k n d"]:
        # the barrier keeps XLA from working the pages out again for every element of the gather
        table = jax.lax.optimization_barrier(jax.lax.dynamic_slice_in_dim(blocks.table, i * m, m, axis=1))
        piece = _values_of(mean, table, head_dim)
        return jax.lax.dynamic_update_slice_in_dim(values, piece, i * m, axis=2)  # past the end both start before it

    empty = jnp.zeros((b, mean.shape[0], n, head_dim), jnp.float32)
    return jax.lax.fori_loop(0, (blocks.most_held + m - 1) // m, step, empty)


def _values_of(mean: Float[Array, "k p e"], table: Int[Array, "b m"], head_dim: int) -> Float[Array, "b k m d"]:
    return mean[:, table].swapaxes(0, 1)[..., head_dim : 2 * head_dim]


def trace_scores(model: ModelShape, page_size: int, dtype: DTypeLike, key_codes: bool, backend: str) -> Any:
    """Score one row and one page, to learn at trace time whether a backend serves these shapes."""
    cache = empty(1, model.num_kv_heads, model.head_dim, 2, page_size, dtype, key_codes=key_codes)
    length = jnp.ones(1, jnp.int32)
    blocks = blocks_of(jnp.ones((1, 1), jnp.int32), length, page_size, None)
    query = jnp.zeros((1, model.num_kv_heads, model.group_size, model.head_dim), jnp.float32)
    return _scores(query, cache.layers[0], blocks, backend, model.softmax(0).soft_cap)


def _scores(
    query: Float[Array, "b k g d"], layer: LayerCache, blocks: Blocks, backend: str, soft_cap: float | None
) -> tuple[Float[Array, "b k g n"] | None, ...]:
    """Return the least, greatest and mean score of every block, its log mass by key codes and how far off that may be.

    The last two are of capped scores, the others before the cap. Without codes they are None.
    """
    b, k, g, d = query.shape
    summary, queries = layer.summaries, query.reshape(b, k * g, d)
    at = {"page_size": layer.pages.shape[2], "scale": 1.0, "backend": backend}
    found = block_scores(queries, summary.key_box, summary.mean, blocks.table, blocks.length, **at)
    if layer.key_codes is None:
        return *(x.reshape(b, k, g, -1) for x in found), None, None
    found += code_scores(
        queries, layer.key_codes, summary.key_box, blocks.table, blocks.length, soft_cap=soft_cap, **at
    )
    return tuple(x.reshape(b, k, g, -1) for x in found)


def _mean_surprisal(surprisal: Float[Array, "p s"], blocks: Blocks) -> Float[Array, "b n"]:
    each = surprisal[blocks.table % len(surprisal)]  # pages of later layers of a stack are further on, by whole pools
    counts = jnp.arange(each.shape[-1]) < blocks.num_tokens[..., None]
    return total(jnp.where(counts, each, 0.0)) / jnp.maximum(blocks.num_tokens, 1).astype(jnp.float32)


def selection_of(layer: LayerKind, most_held: Int[Array, ""] | None, selector: Selector, stored: Stored) -> Selection:
    """Return what a selector chooses for one row and KV head, and what a query may and must see of that."""
    view = replace(view_of(layer, stored), most_held=most_held)
    own = layer.extent(view.length, view.start.shape[0])
    chosen = selection(selector, view)
    return replace(chosen, opened=(chosen.opened & own.readable) | own.certain)


@pytree
class Kept:
    """Which rows read something else than what is chosen by this token, and what: fields as those of `Selected`.

    A row that is not `long` reads all; one that is not `fresh` reads the blocks that are packed in `last`. Truths are
    0 and 1.
    """

    long: Any
    fresh: Any
    last: Any


def chosen_of(
    layer: LayerKind, with_place: bool, chosen: Selection, length: Int[Array, ""], kept: Kept | None
) -> Chosen:
    """Return the blocks that one row and KV head reads, as kernels take them."""
    num_blocks = chosen.opened.shape[0]
    own, opened = layer.extent(length, num_blocks), chosen.opened
    if kept is not None:
        if kept.last is not None:
            last = unpack_blocks(kept.last)[:num_blocks]
            opened = jnp.where(kept.fresh > 0, opened, (last & own.readable) | own.certain)
        opened = jnp.where(kept.long > 0, opened, own.readable)
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    before = jnp.cumsum(opened, dtype=jnp.int32)
    return Chosen(
        mask=pack_blocks(opened),
        # the others follow, the last first
        listed=Placed(array=block, place=jnp.where(opened, before - 1, num_blocks - 1 - (block - before))),
        count=jnp.sum(opened, dtype=jnp.int32),
        estimate=chosen.estimate,
        upper=chosen.upper,
        entropy=attention_entropy(chosen.estimate, own.num_tokens > 0),
        place=jnp.maximum(before - 1, 0) if with_place else None,
        shares=chosen.shares,
    )


@pytree
class Read:
    """What reading the chosen blocks tells of every row and KV head.

    `kept` is the least share of attention mass on the blocks read: certain where the selector bounds the rest,
    otherwise unread blocks count as it guesses them. `mass` is the share of every block, `residual` what the unread
    ones weigh; each None where it is not asked for.
    """

    kept: Float[Array, "*b g"]
    mass: Float[Array, "*b g n"] | None
    residual: "Residual | None"


@pytree
class Residual:
    """The attention masses of the blocks `unread`, 0 of others, of those read, and of all, in one unit."""

    weight: Float[Array, "*b g n"]
    unread: Bool[Array, "*b n"]
    read: Float[Array, "*b g"]
    whole: Float[Array, "*b g"]


def read_of(
    chosen: Chosen,
    blocks: Blocks,
    block_lse: Float[Array, "b k g m"],
    sinks: Float[Array, "k g"] | None,
    layer: LayerKind,
    residual: bool,
) -> Read:
    """Return what reading the chosen blocks tells.

    `block_lse` is the log-sum-exp of each block, in nats, in the order of the list. `sinks` are those of the layer's
    softmax.
    """
    shares = chosen.shares

    def of_one(
        mask: UInt32[Array, " n32"],
        estimate: Float[Array, "g n"],
        upper: Float[Array, "g n"] | None,
        length: Int[Array, ""],
        by_list: Float[Array, "g n"],
        sink: Float[Array, " g"] | None,
        block_lse: Float[Array, "g n"] | None,
    ) -> Read:
        own = layer.extent(length, estimate.shape[1])
        opened = unpack_blocks(mask)[: len(own.start)]
        unread, log_read = own.readable & ~opened, log_sum_exp(by_list)
        if shares:
            estimate = in_units_read(estimate, unread, log_read)
        thought = estimate if upper is None else upper
        return Read(
            kept=bounds.certain_share(thought, opened | ~own.readable, log_read),
            mass=None if block_lse is None else shares_after(estimate, opened, own.readable, block_lse),
            residual=_residual(estimate, unread, with_sink(log_read, sink)) if residual else None,
        )

    # a list has room for the blocks of the page table, which are fewer than what is known of them on a GPU
    short = chosen.estimate.shape[-1] - block_lse.shape[-1]
    block_lse = jnp.pad(block_lse, [(0, 0)] * 3 + [(0, short)], constant_values=-jnp.inf)
    at_place = None if chosen.place is None else Listed(array=block_lse, place=chosen.place)
    return per_head(
        of_one,
        PerHead(array=chosen.mask),
        PerQuery(array=chosen.estimate),
        None if chosen.upper is None else PerQuery(array=chosen.upper),
        PerRow(array=blocks.length),
        PerQuery(array=block_lse),
        None if sinks is None else PerQuery(array=sinks[None]),
        at_place,
    )


def in_units_read(
    share: Float[Array, "g n"], unread: Bool[Array, " n"], log_read: Float[Array, " g"]
) -> Float[Array, "g n"]:
    """Return a guess at shares of the mass, logs, as one at the sums of e^(q . key): what is unread had its share.

    Half of the mass at most is taken for unread.
    """
    left = jnp.minimum(total(jnp.where(unread, jnp.exp(share), 0.0)), 0.5)
    return share + (log_read - jnp.log1p(-left))[:, None]


def shares_after(
    estimate: Float[Array, "g n"], opened: Bool[Array, " n"], readable: Bool[Array, " n"], read: Float[Array, "g n"]
) -> Float[Array, "g n"]:
    """Return each block's share of attention mass, 1 where there is none to read.

    That of the blocks read is from their keys, whose log-sum-exps are `read`; that of the others as it was guessed.
    """
    log_mass = jnp.where(opened, read, estimate)
    return jnp.where(readable, softmax(jnp.where(readable, log_mass, jnp.finfo(jnp.float32).min)), 1.0)


def _residual(estimate: Float[Array, "g n"], unread: Bool[Array, " n"], log_read: Float[Array, " g"]) -> Residual:
    left = jnp.where(unread, estimate, -jnp.inf)
    top = jnp.maximum(jnp.max(left, axis=-1), log_read)
    top = jnp.where(jnp.isfinite(top), top, 0.0)[..., None]
    weight, read = jnp.exp(left - top), jnp.exp(log_read[..., None] - top)[..., 0]
    return Residual(weight=weight, unread=unread, read=read, whole=read + total(weight))


def with_residual(
    out: Float[Array, "b k g d"],
    residual: Residual,
    blocks: Blocks,
    mean: Float[Array, "k p e"],
) -> Float[Array, "b k g d"]:
    """Return the output with every unread block counted as its mean value at its estimated mass.

        o~ = (Z_S o + sum_D Z^_b mean_b) / (Z_S + sum_D Z^_b)

    S the blocks read, D the others a query may see; `out` is o over S, `bounds.residual_error` bounds what
    remains. Z_S is the sum that `out` was divided by: with the sink where there is one. `mean` is that of every page,
    as `PageSummary` has it. Float32.
    """
    mixed = _mixture(residual.weight, residual.unread, mean, blocks, out.shape[-1])
    whole = residual.whole[..., None]
    return (residual.read[..., None] * out + mixed) / jnp.where(whole > 0, whole, 1.0)


def _mixture(
    weight: Float[Array, "b k g n"],
    unread: Bool[Array, "b k n"],
    mean: Float[Array, "k p e"],
    blocks: Blocks,
    head_dim: int,
) -> Float[Array, "b k g d"]:
    """The sum of the mean values of the blocks that are unread, each times its weight.

    On a CPU in pieces up to the longest row, so that it costs what is held and not what fits. Further pieces add 0.
    """

    def mixture(
        weight: Float[Array, "b k g m"], unread: Bool[Array, "b k m"], table: Int[Array, "b m"]
    ) -> Float[Array, "b k g d"]:
        value = jnp.where(unread[..., None], _values_of(mean, table, head_dim), 0.0)  # 0 * NaN is NaN
        return jnp.einsum("bkgm,bkmd->bkgd", weight, value, precision=jax.lax.Precision.HIGHEST)

    if platform() != "cpu":
        return mixture(weight, unread, blocks.table)
    n = blocks.table.shape[1]
    whole = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % _PIECE)]) for x in (weight, unread, blocks.table)]

    def step(i: Int[Array, ""], mixed: Float[Array, "b k g d"]) -> Float[Array, "b k g d"]:
        piece = [jax.lax.dynamic_slice_in_dim(x, i * _PIECE, _PIECE, axis=x.ndim - 1) for x in whole]
        # the barrier keeps XLA from working the pages out again for every element of the gather
        return mixed + mixture(*jax.lax.optimization_barrier(piece))

    steps = (blocks.most_held + _PIECE - 1) // _PIECE
    return jax.lax.fori_loop(0, steps, step, jnp.zeros((*weight.shape[:3], head_dim), jnp.float32))

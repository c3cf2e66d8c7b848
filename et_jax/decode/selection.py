"""Choosing blocks over the cache: a selector asked for every row and KV head, and what its answer is worth.

Selectors see one sequence's blocks (`control.view.BlockView`); the cache holds pages. This is where the
one is made of the other.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from et_jax.control import bounds
from et_jax.control.bounds import Interval
from et_jax.control.selector import Selection, Selector, selection
from et_jax.control.view import BlockView
from et_jax.decode.cache import LayerCache, PageSummary, empty, summarise
from et_jax.decode.eight_bits import dequantized
from et_jax.models.config import ModelShape
from et_jax.pallas.backend import platform
from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.softmax import capped
from et_jax.sums import log_sum_exp, softmax, total
from et_jax.types import pytree, replace

_PIECE = 32  # blocks whose mean values are gathered at once on a CPU


@pytree
class Blocks:
    """The blocks of every row: which positions they hold, and which of them a query may and must see.

    `table` gives their pages, `length` the tokens of a row. `num_tokens` counts a block's tokens, 0
    where a sliding window of the layer hides any of them. `readable` blocks hold a token the query sees;
    `certain` ones are read whatever a selector says: the newest, and the one a window cuts.
    """

    table: Int[Array, "b n"]
    length: Int[Array, " b"]
    start: Int[Array, " n"]
    num_tokens: Int[Array, "b n"]
    readable: Bool[Array, "b n"]
    certain: Bool[Array, "b n"]

    @property
    def most_held(self) -> Int[Array, ""]:
        """How many blocks the longest row holds."""
        return jnp.max(jnp.where(self.readable, jnp.arange(1, self.readable.shape[1] + 1), 0), initial=0)


def held_blocks(length: Int[Array, " b"], page_size: int) -> Int[Array, " b"]:
    """Return the blocks that sequences of these lengths hold."""
    return (length + page_size - 1) // page_size


def first_block(length: Int[Array, " b"], page_size: int, window: int | None) -> Int[Array, " b"]:
    """Return the first block a query at the last position may see."""
    return jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0) // page_size


def blocks_of(table: Int[Array, "b n"], length: Int[Array, " b"], page_size: int, window: int | None) -> Blocks:
    """Return the blocks of rows whose query stands at position `length - 1`."""
    start = jnp.arange(table.shape[1], dtype=jnp.int32) * page_size
    block = jnp.arange(table.shape[1])
    first = first_block(length, page_size, window)[:, None]
    held = held_blocks(length, page_size)[:, None]
    readable = (block >= first) & (block < held)
    hidden = jnp.zeros_like(readable) if window is None else start < length[:, None] - window
    return Blocks(
        table=table,
        length=length,
        start=start,
        num_tokens=jnp.where(hidden, 0, jnp.clip(length[:, None] - start, 0, page_size)),
        readable=readable,
        certain=readable & ((block == held - 1) | hidden),
    )


def select(selector: Selector, view: BlockView, blocks: Blocks) -> Selection:
    """Ask the selector for every row and KV head; `opened` is "b k n", what is thought of the masses "b k g n".

    The selector's numbers have a row each; `view` is that of `view_of`.
    """
    most_held = blocks.most_held

    def asked(selector: Selector, view: BlockView) -> Selection:
        return selection(selector, replace(view, most_held=most_held))

    chosen = jax.vmap(jax.vmap(asked, in_axes=(None, 0)))(selector, view)
    opened = (chosen.opened & blocks.readable[:, None]) | blocks.certain[:, None]
    return replace(chosen, opened=opened)


def view_of(
    query: Float[Array, "b k g d"],
    cached: LayerCache,
    surprisal: Float[Array, "p s"] | None,
    blocks: Blocks,
    tolerance: Float[Array, " b"],
    backend: str,
    soft_cap: float | None = None,
) -> BlockView:
    """Return what selectors see of every row and KV head in one layer, "b k" in front of every field.

    `query` is float32 and scaled, `surprisal` that of every cached token. `backend` names the kernels that score the
    blocks, `soft_cap` is that of the layer's softmax. Raises ValueError for a cache without summaries.
    """
    (b, k, _, d), stored = query.shape, cached.summaries
    score, middle, coded = _scores(query, cached, blocks, backend, soft_cap)
    held = jax.tree.map(lambda x: x[:, blocks.table].swapaxes(0, 1).astype(jnp.float32), stored)
    value_mean = _mean_values(stored.mean, blocks, d)
    tail = _tail(query, cached, blocks, soft_cap)
    at_tail = (jnp.arange(blocks.table.shape[1]) == tail.block[:, None])[:, None]  # "b 1 n"

    def exact(own: Float[Array, "b k *x"], kept: Float[Array, "b k *y"], axis: int) -> Float[Array, "b k *y"]:
        there = jnp.expand_dims(at_tail, tuple(range(2, axis)) + tuple(range(axis + 1, kept.ndim)))
        return jnp.where(there, jnp.expand_dims(own, axis), kept)

    box, mean, radius = (
        exact(getattr(tail.summary, name), getattr(held, name), 2) for name in ("key_box", "mean", "value_radius")
    )
    value_mean = exact(tail.summary.mean[..., d : 2 * d], value_mean, 2)

    def for_heads(x: Shaped[Array, "b *rest"]) -> Shaped[Array, "b k *rest"]:
        return jnp.broadcast_to(x[:, None], (b, k, *x.shape[1:]))

    mean_surprisal = None
    if surprisal is not None:
        mean_surprisal = for_heads(jnp.where(at_tail[:, 0], 0.0, _mean_surprisal(surprisal, blocks)))
    score, middle = jax.tree.map(partial(exact, axis=3), tail.score, score), exact(tail.middle, middle, 3)
    mean_score = None
    if soft_cap is not None:
        (score, mean_score), middle = bounds.capped_scores(score, middle, soft_cap), capped(middle, soft_cap)
    return BlockView(
        query=query,
        score=score,
        middle=middle,
        key_min=box[..., :d],
        key_max=box[..., d : 2 * d],
        key_mean=mean[..., :d],
        value_mean=value_mean,
        value_radius=radius,
        start=jnp.broadcast_to(blocks.start, (b, k, *blocks.start.shape)),
        num_tokens=for_heads(blocks.num_tokens),
        length=for_heads(blocks.length),
        tolerance=for_heads(tolerance),
        head_tolerance=jnp.broadcast_to(tolerance[:, None, None], query.shape[:3]),
        tail_log_mass=tail.log_mass,
        mean_score=mean_score,
        coded=coded,
        mean_surprisal=mean_surprisal,
    )


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


@pytree
class _Tail:
    """The block each row ends in, from its own keys and values up to that end; log mass in nats, of capped scores.

    A page's summary is of all that was written to it: by rows that share it too, and after this row's end.
    """

    block: Int[Array, " b"]
    summary: PageSummary
    score: Interval
    middle: Float[Array, "b k g"]
    log_mass: Float[Array, "b k g"]


def _tail(query: Float[Array, "b k g d"], layer: LayerCache, blocks: Blocks, soft_cap: float | None) -> _Tail:
    """Look at the one page that each row ends in; its log mass is the least float for an empty row."""
    d, s = query.shape[3], layer.pages.shape[2]
    last = jnp.maximum(blocks.length - 1, 0)
    page = jnp.take_along_axis(blocks.table, (last // s)[:, None], axis=1)[:, 0]
    # every axis but the last is indexed: a window over heads or tokens makes XLA lay the pool out anew on TPU
    head = jnp.arange(layer.pages.shape[0])[:, None, None]
    scales = None if layer.kv_scales is None else layer.kv_scales[head, page[:, None], jnp.arange(2)]
    token = dequantized(layer.pages[head, page[:, None], jnp.arange(s)], scales, d)
    num_tokens = blocks.length - last // s * s
    summary = jax.tree.map(lambda x: x.swapaxes(0, 1).astype(jnp.float32), summarise(token, num_tokens, d))
    score = jnp.einsum(
        "bkgd,kbsd->bkgs", query, token[..., :d].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    seen = (jnp.arange(s) < num_tokens[:, None])[:, None, None]
    over_heads = jax.vmap(jax.vmap(lambda q, low, high: bounds.box(q, low[None], high[None])))
    box = over_heads(query, summary.key_box[..., :d], summary.key_box[..., d : 2 * d])
    return _Tail(
        block=last // s,
        summary=summary,
        score=jax.tree.map(lambda x: x[..., 0], box),
        middle=total(query * summary.mean[..., None, :d]),
        log_mass=log_sum_exp(jnp.where(seen, capped(score, soft_cap), jnp.finfo(jnp.float32).min)),
    )


def trace_scores(model: ModelShape, page_size: int, dtype: DTypeLike, key_codes: bool, backend: str) -> Array:
    """Score one row and one page, to learn at trace time whether a backend serves these shapes."""
    cache = empty(1, model.num_kv_heads, model.head_dim, 2, page_size, dtype, key_codes=key_codes)
    length = jnp.ones(1, jnp.int32)
    blocks = blocks_of(jnp.ones((1, 1), jnp.int32), length, page_size, None)
    query = jnp.zeros((1, model.num_kv_heads, model.group_size, model.head_dim), jnp.float32)
    return _scores(query, cache.layers[0], blocks, backend, model.softmax(0).soft_cap)[1]


def _scores(
    query: Float[Array, "b k g d"], layer: LayerCache, blocks: Blocks, backend: str, soft_cap: float | None
) -> tuple[Interval, Float[Array, "b k g n"], Interval | None]:
    """Return the range of every block's scores, its mean key's score, and what the key codes bound its log mass by.

    The log mass is of capped scores, the others are before the cap.
    """
    b, k, g, d = query.shape
    summary, queries = layer.summaries, query.reshape(b, k * g, d)
    at = {"page_size": layer.pages.shape[2], "scale": 1.0, "backend": backend}

    def grouped(x: Float[Array, "b h n"]) -> Float[Array, "b k g n"]:
        return x.reshape(b, k, g, -1)

    found = block_scores(queries, summary.key_box, summary.mean, blocks.table, blocks.length, **at)
    low, high, middle = map(grouped, found)
    if layer.key_codes is None:
        return Interval(low=low, high=high), middle, None
    found = code_scores(queries, layer.key_codes, summary.key_box, blocks.table, blocks.length, soft_cap=soft_cap, **at)
    coded_lse, error = map(grouped, found)
    known = jnp.where((blocks.num_tokens > 0)[:, None, None], coded_lse, -jnp.inf)
    return Interval(low=low, high=high), middle, Interval(low=known - error, high=known + error)


def _mean_surprisal(surprisal: Float[Array, "p s"], blocks: Blocks) -> Float[Array, "b n"]:
    each = surprisal[blocks.table % len(surprisal)]  # pages of later layers of a stack are further on, by whole pools
    counts = jnp.arange(each.shape[-1]) < blocks.num_tokens[..., None]
    return total(jnp.where(counts, each, 0.0)) / jnp.maximum(blocks.num_tokens, 1).astype(jnp.float32)


def least_share_read(chosen: Selection, blocks: Blocks, log_read: Float[Array, "b k g"]) -> Float[Array, " b"]:
    """Return the least share of attention mass read, over heads: certain where the selector bounds the rest.

    Otherwise unread blocks count as the selector guesses them. `log_read` is the log-sum-exp over what
    was read, in nats.
    """
    thought = chosen.estimate if chosen.upper is None else chosen.upper
    read = chosen.opened | ~blocks.readable[:, None]
    each = jax.vmap(jax.vmap(bounds.certain_share))(thought, read, log_read)
    return jnp.min(each, axis=(1, 2))


def in_units_read(chosen: Selection, blocks: Blocks, log_read: Float[Array, "b k g"]) -> Selection:
    """Return a selection whose guess, of shares, is made one at the sums of e^(q . key): what is unread had its share.

    Half of the mass at most is taken for unread.
    """
    unread = (blocks.readable[:, None] & ~chosen.opened)[:, :, None]
    left = jnp.minimum(total(jnp.where(unread, jnp.exp(chosen.estimate), 0.0)), 0.5)
    whole = log_read - jnp.log1p(-left)
    return replace(chosen, estimate=chosen.estimate + whole[..., None], shares=False)


def shares_after(chosen: Selection, blocks: Blocks, block_lse: Float[Array, "b k g n"]) -> Float[Array, "b k g n"]:
    """Return each block's share of attention mass, 1 where there is none to read.

    That of the blocks read is from their keys, whose log-sum-exps are `block_lse`, in ascending order of the blocks;
    that of the others as it was guessed.
    """
    opened, readable = chosen.opened[:, :, None], blocks.readable[:, None, None]
    place = jnp.maximum(jnp.cumsum(opened, axis=-1, dtype=jnp.int32) - 1, 0)
    read = jnp.take_along_axis(block_lse, jnp.broadcast_to(place, block_lse.shape), axis=-1)
    log_mass = jnp.where(opened, read, chosen.estimate)
    return jnp.where(readable, softmax(jnp.where(readable, log_mass, jnp.finfo(jnp.float32).min)), 1.0)


def with_residual(
    out: Float[Array, "b k g d"],
    chosen: Selection,
    blocks: Blocks,
    log_read: Float[Array, "b k g"],
    mean: Float[Array, "k p e"],
) -> Float[Array, "b k g d"]:
    """Return the output with every unread block counted as its mean value at its estimated mass.

        o~ = (Z_S o + sum_D Z^_b mean_b) / (Z_S + sum_D Z^_b)

    S the blocks read, D the others a query may see; `out` is o over S, `bounds.residual_error` bounds what
    remains. `log_read` is log Z_S, the sum that `out` was divided by: with the sink where there is one. `mean` is that
    of every page, as `PageSummary` has it. Float32.
    """
    unread = blocks.readable[:, None] & ~chosen.opened
    left = jnp.where(unread[:, :, None], chosen.estimate, -jnp.inf)
    top = jnp.maximum(jnp.max(left, axis=-1), log_read)
    top = jnp.where(jnp.isfinite(top), top, 0.0)[..., None]
    weight, read = jnp.exp(left - top), jnp.exp(log_read[..., None] - top)
    mixed = _mixture(weight, unread, mean, blocks, out.shape[-1])
    whole = read + total(weight)[..., None]
    return (read * out + mixed) / jnp.where(whole > 0, whole, 1.0)


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

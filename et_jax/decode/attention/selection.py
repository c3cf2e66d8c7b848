"""Block selection over the cache: a selector runs for every row and KV head.

Selectors see one sequence's blocks (`control.view.BlockView`); the cache has pages. This module converts one into the
other.
"""

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
from et_jax.decode.attention.blocks import Blocks, LayerKind, blocks_of
from et_jax.decode.attention.summaries import PIECE, mean_values, summary_of
from et_jax.decode.cache.eight_bits import scaled
from et_jax.decode.cache.kv import LayerCache, empty
from et_jax.models.config import ModelShape
from et_jax.pallas.backend import platform
from et_jax.pallas.block_scores import block_scores, code_scores
from et_jax.pallas.per_head import Pages, PerHead, PerQuery, PerRow, Placed
from et_jax.softmax import capped
from et_jax.sums import log_sum_exp, total
from et_jax.types import pytree, replace, static


@pytree
class SelectorInputs:
    """The inputs of selectors in one layer: inputs of `per_head`, or the arrays of one row and KV head.

    `low`, `high` and `middle` are the scores of every block by its summary, before a soft cap. `coded` is the log of
    its mass by 8-bit keys, `error` bounds its distance from the exact log mass, and `coded_mean` is the mean of their
    scores. `key` and `value` are those of the
    last page of a row, with their scales in a cache of 8 bits. The others are as in `BlockView`.
    """

    query: Any
    low: Any
    high: Any
    middle: Any
    coded: Any
    error: Any
    coded_mean: Any
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


def selector_inputs(
    query: Float[Array, "b k g d"],
    cached: LayerCache,
    surprisal: Float[Array, "p s"] | None,
    blocks: Blocks,
    tolerance: Float[Array, " b"],
    backend: str,
    layer: LayerKind,
) -> SelectorInputs:
    """Return the inputs of selectors in one layer. The kernels of `backend` score its blocks.

    `query` is float32 and scaled, `surprisal` that of every cached token. Raises ValueError for a cache without
    summaries.
    """
    k, d, summaries, table = *query.shape[1::2], cached.summaries, blocks.table
    low, high, middle, coded, error, coded_mean = _scores(query, cached, blocks, backend, layer.soft_cap)
    tail = blocks.last
    if tail is None:
        last = jnp.maximum(blocks.length - 1, 0) // cached.pages.shape[2]
        tail = jnp.take_along_axis(table, last[:, None], axis=1)[:, 0]

    def of_pages(pool: Array, first: int | None, page: Array = table) -> Pages:
        columns = None if first is None else (first, first + d)
        return Pages(pool=pool, page=page, turn=blocks.turn, depth=blocks.depth, columns=columns)

    scales = (None, None)
    if cached.kv_scales is not None:
        page = tail if blocks.turn is None else tail + blocks.turn * cached.num_pages
        rows = cached.kv_scales[jnp.arange(k)[:, None, None], page[:, None], jnp.arange(2)].swapaxes(0, 1)
        scales = tuple(PerHead(array=rows[:, :, i]) for i in (0, 1))
    value_mean: Any = of_pages(summaries.mean, d)
    if platform() == "cpu":
        value_mean = PerHead(array=_mean_values(summaries.mean, blocks, d))
    return SelectorInputs(
        query=PerQuery(array=query),
        low=PerQuery(array=low),
        high=PerQuery(array=high),
        middle=PerQuery(array=middle),
        coded=None if coded is None else PerQuery(array=coded),
        error=None if error is None else PerQuery(array=error),
        coded_mean=None if coded_mean is None else PerQuery(array=coded_mean),
        key=of_pages(cached.pages, 0, tail),
        value=of_pages(cached.pages, d, tail),
        key_scale=scales[0],
        value_scale=scales[1],
        key_min=of_pages(summaries.key_box, 0),
        key_max=of_pages(summaries.key_box, d),
        key_mean=of_pages(summaries.mean, 0),
        value_mean=value_mean,
        value_radius=of_pages(summaries.value_radius, None),
        mean_surprisal=None if surprisal is None else PerRow(array=_mean_surprisal(surprisal, blocks)),
        last_mass=None,
        sensitivity=None,
        length=PerRow(array=blocks.length),
        tolerance=PerRow(array=tolerance),
    )


def view_of(layer: LayerKind, inputs: SelectorInputs) -> BlockView:
    """Return the view of one row and KV head.

    The last block of the row is summarised here, from its own keys and values up to the row's end: the page's stored
    summary covers all tokens written to it, including those of other rows that share it and those after this row's end.
    """
    length, n, page_size, soft_cap = inputs.length, inputs.middle.shape[-1], layer.page_size, layer.soft_cap
    blocks = layer.extent(length, n)
    at_tail = jnp.arange(n) == jnp.maximum(length - 1, 0) // page_size
    num_tokens = length - jnp.maximum(length - 1, 0) // page_size * page_size
    seen = jnp.arange(page_size) < num_tokens
    key, value = scaled(inputs.key, inputs.key_scale), scaled(inputs.value, inputs.value_scale)
    summary = summary_of(key, value, seen)
    tail_score = jnp.einsum("gd,sd->gs", inputs.query, key.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    box = bounds.box(inputs.query, summary.key_min[None], summary.key_max[None])

    def exact(own: Float[Array, "*x"], stored: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
        there = at_tail.reshape(-1, *[1] * (-1 - axis))
        return jnp.where(there, jnp.expand_dims(own, axis), stored)

    score = Interval(low=exact(box.low[..., 0], inputs.low), high=exact(box.high[..., 0], inputs.high))
    middle, mean_score = exact(total(inputs.query * summary.key_mean), inputs.middle), None
    if soft_cap is not None:
        (score, mean_score), middle = bounds.capped_scores(score, middle, soft_cap), capped(middle, soft_cap)
    coded = None
    if inputs.coded is not None:
        known = jnp.where(blocks.num_tokens > 0, inputs.coded, -jnp.inf)
        coded = Interval(low=known - inputs.error, high=known + inputs.error)
    surprisal = inputs.mean_surprisal
    return BlockView(
        query=inputs.query,
        score=score,
        middle=middle,
        key_min=exact(summary.key_min, inputs.key_min.astype(jnp.float32), -2),
        key_max=exact(summary.key_max, inputs.key_max.astype(jnp.float32), -2),
        key_mean=exact(summary.key_mean, inputs.key_mean, -2),
        value_mean=exact(summary.value_mean, inputs.value_mean, -2),
        value_radius=exact(summary.value_radius, inputs.value_radius),
        start=blocks.start,
        num_tokens=blocks.num_tokens,
        length=length,
        tolerance=inputs.tolerance,
        head_tolerance=jnp.broadcast_to(inputs.tolerance, inputs.query.shape[:1]),
        tail_log_mass=log_sum_exp(jnp.where(seen, capped(tail_score, soft_cap), jnp.finfo(jnp.float32).min)),
        mean_score=mean_score,
        coded=coded,
        coded_mean=inputs.coded_mean,
        mean_surprisal=None if surprisal is None else jnp.where(at_tail, 0.0, surprisal),
        sensitivity=inputs.sensitivity,
        last_mass=inputs.last_mass,
    )


def _mean_values(mean: Float[Array, "k p e"], blocks: Blocks, head_dim: int) -> Float[Array, "b k n d"]:
    """Return the mean value of every block. On a CPU in pieces up to the longest row, and 0 beyond."""
    b, n = blocks.table.shape
    if platform() != "cpu":
        return mean_values(mean, blocks.table, head_dim)
    m = min(PIECE, n)

    def step(i: Int[Array, ""], values: Float[Array, "b k n d"]) -> Float[Array, "b k n d"]:
        # the barrier keeps XLA from computing the pages again for every element of the gather
        table = jax.lax.optimization_barrier(jax.lax.dynamic_slice_in_dim(blocks.table, i * m, m, axis=1))
        piece = mean_values(mean, table, head_dim)
        return jax.lax.dynamic_update_slice_in_dim(values, piece, i * m, axis=2)  # clamped at the end like the read

    empty = jnp.zeros((b, mean.shape[0], n, head_dim), jnp.float32)
    return jax.lax.fori_loop(0, (blocks.most_blocks + m - 1) // m, step, empty)


def trace_scores(model: ModelShape, page_size: int, dtype: DTypeLike, key_codes: bool, backend: str) -> Any:
    """Score one row and one page: at trace time a backend raises for shapes that it does not support."""
    cache = empty(1, model.num_kv_heads, model.head_dim, 2, page_size, dtype, key_codes=key_codes)
    length = jnp.ones(1, jnp.int32)
    blocks = blocks_of(jnp.ones((1, 1), jnp.int32), length, page_size, None)
    query = jnp.zeros((1, model.num_kv_heads, model.group_size, model.head_dim), jnp.float32)
    return _scores(query, cache.layers[0], blocks, backend, model.softmax(0).soft_cap)


def _scores(
    query: Float[Array, "b k g d"], layer: LayerCache, blocks: Blocks, backend: str, soft_cap: float | None
) -> tuple[Float[Array, "b k g n"] | None, ...]:
    """Return the least, greatest and mean score of every block, and by key codes its log mass, error and mean score.

    The last three are of capped scores, the others before the cap. Without codes they are None. The compiler drops the
    scores that the selector does not use, with their kernel.
    """
    b, k, g, d = query.shape
    summary, queries = layer.summaries, query.reshape(b, k * g, d)
    at = {"page_size": layer.pages.shape[2], "scale": 1.0, "backend": backend}
    at |= {"turn": blocks.turn, "depth": blocks.depth}
    found = block_scores(queries, summary.key_box, summary.mean, blocks.table, blocks.length, **at)
    if layer.key_codes is None:
        return *(x.reshape(b, k, g, -1) for x in found), None, None, None
    found += code_scores(
        queries, layer.key_codes, summary.key_box, blocks.table, blocks.length, soft_cap=soft_cap, **at
    )
    return tuple(x.reshape(b, k, g, -1) for x in found)


def _mean_surprisal(surprisal: Float[Array, "p s"], blocks: Blocks) -> Float[Array, "b n"]:
    each = surprisal[blocks.table % len(surprisal)]  # pages of later layers of a stack are offset by entire pools
    counts = jnp.arange(each.shape[-1]) < blocks.num_tokens[..., None]
    return total(jnp.where(counts, each, 0.0)) / jnp.maximum(blocks.num_tokens, 1).astype(jnp.float32)


def selection_of(
    layer: LayerKind, most_blocks: Int[Array, ""] | None, selector: Selector, inputs: SelectorInputs
) -> Selection:
    """Return the selection for one row and KV head, without unreadable blocks and with the certain ones."""
    view = replace(view_of(layer, inputs), most_blocks=most_blocks)
    own = layer.extent(view.length, view.start.shape[0])
    selected = selection(selector, view)
    return replace(selected, opened=(selected.opened & own.readable) | own.certain)


@pytree
class SelectedBlocks:
    """The blocks that every row and KV head attends to: packed, and `listed` in ascending order, the first `count`.

    `estimate`, `upper` and `shares` are as in `Selection`. `entropy` is that of attention over the estimates, `place`
    the place of every block in the list, None unless requested.
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
        """The blocks that are attended to."""
        return unpack_blocks(self.mask)[..., : self.estimate.shape[-1]]


@pytree
class Fallback:
    """The rows that do not use this token's selection: fields as in `BlockSparse`.

    A row that is not `long` attends to all blocks. A row without `refresh` attends to the blocks packed in `last`;
    both are None if every row selects. Booleans are 0 and 1.
    """

    long: Any
    refresh: Any
    last: Any


def selected_blocks(
    layer: LayerKind, with_place: bool, selected: Selection, length: Int[Array, ""], fallback: Fallback | None
) -> SelectedBlocks:
    """Return the blocks that one row and KV head attends to, in the form of the attention kernels."""
    num_blocks = selected.opened.shape[0]
    own, opened = layer.extent(length, num_blocks), selected.opened
    if fallback is not None:
        if fallback.last is not None:
            last = unpack_blocks(fallback.last)[:num_blocks]
            opened = jnp.where(fallback.refresh > 0, opened, (last & own.readable) | own.certain)
        opened = jnp.where(fallback.long > 0, opened, own.readable)
    before = jnp.cumsum(opened, dtype=jnp.int32)
    return SelectedBlocks(
        mask=pack_blocks(opened),
        listed=moved_to_list(opened, before) if platform() == "tpu" else placed_in_list(opened, before),
        count=jnp.sum(opened, dtype=jnp.int32),
        estimate=selected.estimate,
        upper=selected.upper,
        entropy=attention_entropy(selected.estimate, own.num_tokens > 0),
        place=jnp.maximum(before - 1, 0) if with_place else None,
        shares=selected.shares,
    )


def placed_in_list(opened: Bool[Array, " n"], before: Int[Array, " n"]) -> Placed:
    """Return the opened blocks in order; the others follow, the last first. `before` counts those up to each block."""
    num_blocks = opened.shape[0]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    return Placed(array=block, place=jnp.where(opened, before - 1, num_blocks - 1 - (block - before)))


def moved_to_list(opened: Bool[Array, " n"], before: Int[Array, " n"]) -> Int[Array, " n"]:
    """Return the opened blocks in order, then block 0, without a scatter, which a TPU's kernels lack.

    Each moves down by the number of closed blocks before it, by its powers of two from the least on. None meets
    another, because these numbers rise by less than the blocks do.
    """
    num_blocks = opened.shape[0]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    left = jnp.where(opened, block + 1 - before, 0)  # how far each still moves
    block, there = jnp.where(opened, block, 0), opened.astype(jnp.int32)
    step = 1
    while step < num_blocks:
        moves = jnp.where((left & step) > 0, there, 0)
        from_above = [jnp.pad((x * moves)[step:], (0, step)) for x in (block, left, there)]
        block, left, there = (
            x * (1 - moves) + above for x, above in zip((block, left, there), from_above, strict=True)
        )
        step *= 2
    return block

"""Prompts read under a budget: each segment's queries attend to the blocks chosen for it, head by head.

A segment is a row of prefill, whatever stands beside it. What a budget keeps of a prompt goes from row to row within a
layer, and from call to call in `ControlState.prompt`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.budget import Budget, PromptNotes
from et_jax.control.segment import Segment, interval, observed
from et_jax.decode.attention import with_layer
from et_jax.decode.cache import KVCache, LayerCache, write
from et_jax.decode.reading import ReadPolicy, list_blocks
from et_jax.decode.selection import held_blocks
from et_jax.models.transformer import Attend
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.sums import log_sum_exp, total
from et_jax.types import pytree, replace


@pytree
class PromptRow:
    """What is known of each row: `count` tokens of a prompt from position `start` on, in `slot`, whose pages are given.

    Rows of one slot stand in order; it holds `end` tokens once all are written. `last` rows end their prompt.
    """

    slot: Int[Array, " r"]
    table: Int[Array, "r n"]
    start: Int[Array, " r"]
    count: Int[Array, " r"]
    end: Int[Array, " r"]
    last: Bool[Array, " r"]


@pytree
class PromptCarry:
    """The cache on its way through the layers, and every slot's notes."""

    cache: KVCache
    notes: PromptNotes


def budgeted_attend(reading: ReadPolicy, budget: Budget, rows: PromptRow) -> Attend:
    """Return the `attend` of segments of prompts, of which the budget chooses what they read."""
    page_size, num_heads = reading.page_size, reading.model.num_kv_heads
    num_blocks = held_blocks(rows.start + rows.count, page_size)
    block = jnp.arange(rows.table.shape[1], dtype=jnp.int32)
    held = (block < num_blocks[:, None]) & (rows.count > 0)[:, None]
    own = held & (block >= (rows.start // page_size)[:, None])
    whole = rows.last | (rows.start < budget.dense_until)

    def attend(layer: int, q: Array, k: Array, v: Array, memory: PromptCarry) -> tuple[Array, PromptCarry]:
        cached = write(memory.cache.layers[layer], k, v, rows.table, rows.start, rows.count, rows.end)
        cache, notes = with_layer(memory.cache, layer, cached), memory.notes
        read = partial(
            paged_prefill,
            q,
            cached.pages,
            rows.table,
            rows.start,
            softmax=reading.softmax(layer),
            backend=reading.backend,
        )
        held_by_heads = jnp.broadcast_to(held[:, None], (len(held), num_heads, held.shape[1]))
        if layer < budget.dense_layers or reading.model.windows[layer] is not None:
            return read()[0], PromptCarry(cache=cache, notes=_note(notes, rows, held_by_heads, held_by_heads))
        opened, notes = _choose(reading, budget, rows, layer, q, cached, held & ~own, notes)
        opened = jnp.where(whole[:, None, None], held[:, None], opened | own[:, None])
        blocks, counts = list_blocks(opened)
        notes = _note(notes, rows, opened, held_by_heads)
        if notes.mass is not None:
            notes = _probe(notes, reading, rows, layer, q, cached, opened, ~whole & (rows.count > 0))
        return read(blocks=blocks, counts=counts)[0], PromptCarry(cache=cache, notes=notes)

    return attend


def _choose(
    reading: ReadPolicy,
    budget: Budget,
    rows: PromptRow,
    layer: int,
    q: Float[Array, "r t h d"],
    cached: LayerCache,
    visible: Bool[Array, "r n"],
    notes: PromptNotes,
) -> tuple[Bool[Array, "r k n"], PromptNotes]:
    """The blocks before each row that its queries read, row by row, for a slot's rows follow on each other."""
    assert cached.summary is not None
    (r, t, _, d), scale = q.shape, reading.softmax(layer).scale
    grouped = q.astype(jnp.float32).reshape(r, t, reading.model.num_kv_heads, -1, d)
    box = cached.summary.key_box[:, rows.table].swapaxes(0, 1).astype(jnp.float32)
    # what no row may see can hold anything, and 0 * NaN is NaN
    box = jnp.where(visible[:, None, :, None], box, 0.0)
    low, high = box[..., :d], box[..., d : 2 * d]
    real = jnp.arange(t) < rows.count[:, None]
    score = jax.vmap(observed)(grouped, real, low, high) * scale
    bounds = None
    if budget.needs_interval:
        bounds = jax.vmap(partial(interval, group=reading.page_size))(grouped * scale, real, low, high)

    def one(every: PromptNotes, row: tuple) -> tuple[PromptNotes, Bool[Array, "k n"]]:
        slot, start, count, visible, score, bounds = row
        segment = Segment(
            score=score,
            visible=visible,
            interval=bounds,
            index=start // t,
            layer=layer,
            block_size=reading.page_size,
            scale=scale,
        )
        opened, kept = budget.choose(segment, jax.tree.map(lambda x: x[slot, layer], every.kept))
        place = jnp.where(count > 0, slot, len(every.blocks_read))
        put = jax.tree.map(lambda old, new: old.at[place, layer].set(new, mode="drop"), every.kept, kept)
        return replace(every, kept=put), opened

    after, opened = jax.lax.scan(one, notes, (rows.slot, rows.start, rows.count, visible, score, bounds))
    return opened, after


def _note(notes: PromptNotes, rows: PromptRow, opened: Bool[Array, "r k n"], held: Bool[Array, "r k n"]) -> PromptNotes:
    """The notes with what the rows read."""
    read, there = (jnp.sum(x, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32) for x in (opened, held))
    return replace(
        notes,
        blocks_read=notes.blocks_read.at[rows.slot].add(read),
        blocks_held=notes.blocks_held.at[rows.slot].add(there),
    )


def _probe(
    notes: PromptNotes,
    reading: ReadPolicy,
    rows: PromptRow,
    layer: int,
    q: Float[Array, "r t h d"],
    cached: LayerCache,
    opened: Bool[Array, "r k n"],
    asked: Bool[Array, " r"],
) -> PromptNotes:
    """The notes with the share of its attention that the last query of the rows `asked` has on the blocks opened."""
    newest = jnp.take_along_axis(q, jnp.maximum(rows.count - 1, 0)[:, None, None, None], axis=1)[:, 0]
    length = jnp.where(asked, rows.start + rows.count, 0)
    there = jnp.arange(opened.shape[2]) < held_blocks(length, reading.page_size)[:, None, None]
    blocks, counts = list_blocks(jnp.broadcast_to(there, opened.shape))
    _, mass = paged_attention(
        newest,
        cached.pages,
        rows.table,
        blocks,
        counts,
        length,
        softmax=reading.softmax(layer),
        backend=reading.backend,
    )
    by_head = jnp.repeat(opened, mass.shape[1] // opened.shape[1], axis=1)
    kept = log_sum_exp(jnp.where(by_head, mass, -jnp.inf)) - log_sum_exp(mass)
    share = jnp.where(asked, total(jnp.exp(jnp.where(asked[:, None], kept, -jnp.inf))), 0.0)
    num = jnp.where(asked, float(mass.shape[1]), 0.0)
    assert notes.mass is not None and notes.num_probes is not None
    return replace(
        notes,
        mass=notes.mass.at[rows.slot].add(share),
        num_probes=notes.num_probes.at[rows.slot].add(num),
    )

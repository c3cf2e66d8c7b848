"""Prompts read under a budget: each segment's queries attend to the blocks chosen for it, head by head.

A segment is a row of prefill, whatever stands beside it. What a budget keeps of a prompt goes from row to row within a
layer, and from call to call in `ControlState.prompt`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from et_jax.control.budget import Budget, PromptNotes
from et_jax.control.segment import Segment, interval, observed
from et_jax.decode.cache import KVCache, LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.decode.reading import list_blocks
from et_jax.decode.selection import held_blocks
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.sums import log_sum_exp, total
from et_jax.types import pytree, replace


@pytree
class Budgeted:
    """Reads of each row, a segment of a prompt, what a budget chooses; rows that are `last` end their prompt.

    Its `notes` are those of every slot.
    """

    budget: Budget
    last: Bool[Array, " r"]
    notes: PromptNotes

    def begun(self, num_rows: int) -> PromptNotes:
        """Return the notes so far."""
        return self.notes

    def together(self, plant: Plant, layer: int) -> bool:
        """Return that rows are read one by one."""
        return False

    def read(
        self, plant: Plant, layer: int, q: Float[Array, "r t h d"], cache: KVCache, chunk: Chunk, notes: PromptNotes
    ) -> tuple[Float[Array, "r t h d"], PromptNotes]:
        """Return attention to the blocks chosen, and the notes with them."""
        budget, page_size, cached = self.budget, plant.page_size, cache.layers[layer]
        num_blocks = held_blocks(chunk.start + chunk.count, page_size)
        block = jnp.arange(chunk.table.shape[1], dtype=jnp.int32)
        held = (block < num_blocks[:, None]) & (chunk.count > 0)[:, None]
        own = held & (block >= (chunk.start // page_size)[:, None])
        whole = self.last | (chunk.start < budget.dense_until)
        attend = partial(
            paged_prefill,
            q,
            cached.pages,
            chunk.table,
            chunk.start,
            softmax=plant.softmax(layer),
            backend=plant.backend,
        )
        held_by_heads = jnp.broadcast_to(held[:, None], (len(held), plant.model.num_kv_heads, held.shape[1]))
        if layer < budget.dense_layers or plant.model.windows[layer] is not None:
            return attend()[0], _note(notes, chunk, held_by_heads, held_by_heads)
        opened, notes = _choose(plant, budget, chunk, layer, q, cached, held & ~own, notes)
        opened = jnp.where(whole[:, None, None], held[:, None], opened | own[:, None])
        blocks, counts = list_blocks(opened)
        notes = _note(notes, chunk, opened, held_by_heads)
        if notes.mass is not None:
            notes = _probe(notes, plant, chunk, layer, q, cached, opened, ~whole & (chunk.count > 0))
        return attend(blocks=blocks, counts=counts)[0], notes


def _choose(
    plant: Plant,
    budget: Budget,
    chunk: Chunk,
    layer: int,
    q: Float[Array, "r t h d"],
    cached: LayerCache,
    visible: Bool[Array, "r n"],
    notes: PromptNotes,
) -> tuple[Bool[Array, "r k n"], PromptNotes]:
    """The blocks before each row that its queries read, row by row, for a slot's rows follow on each other."""
    assert cached.summary is not None
    (r, t, _, d), scale = q.shape, plant.softmax(layer).scale
    grouped = q.astype(jnp.float32).reshape(r, t, plant.model.num_kv_heads, -1, d)
    box = cached.summary.key_box[:, chunk.table].swapaxes(0, 1).astype(jnp.float32)
    # what no row may see can hold anything, and 0 * NaN is NaN
    box = jnp.where(visible[:, None, :, None], box, 0.0)
    low, high = box[..., :d], box[..., d : 2 * d]
    real = jnp.arange(t) < chunk.count[:, None]
    score = jax.vmap(observed)(grouped, real, low, high) * scale
    bounds = None
    if budget.needs_interval:
        bounds = jax.vmap(partial(interval, group=plant.page_size))(grouped * scale, real, low, high)

    def one(every: PromptNotes, row: tuple) -> tuple[PromptNotes, Bool[Array, "k n"]]:
        slot, start, count, visible, score, bounds = row
        segment = Segment(
            score=score,
            visible=visible,
            interval=bounds,
            index=start // t,
            layer=layer,
            block_size=plant.page_size,
            scale=scale,
        )
        opened, kept = budget.choose(segment, jax.tree.map(lambda x: x[slot, layer], every.kept))
        place = jnp.where(count > 0, slot, len(every.blocks_read))
        put = jax.tree.map(lambda old, new: old.at[place, layer].set(new, mode="drop"), every.kept, kept)
        return replace(every, kept=put), opened

    after, opened = jax.lax.scan(one, notes, (chunk.slot, chunk.start, chunk.count, visible, score, bounds))
    return opened, after


def _note(notes: PromptNotes, chunk: Chunk, opened: Bool[Array, "r k n"], held: Bool[Array, "r k n"]) -> PromptNotes:
    """The notes with what the rows read."""
    read, there = (jnp.sum(x, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32) for x in (opened, held))
    return replace(
        notes,
        blocks_read=notes.blocks_read.at[chunk.slot].add(read),
        blocks_held=notes.blocks_held.at[chunk.slot].add(there),
    )


def _probe(
    notes: PromptNotes,
    plant: Plant,
    chunk: Chunk,
    layer: int,
    q: Float[Array, "r t h d"],
    cached: LayerCache,
    opened: Bool[Array, "r k n"],
    asked: Bool[Array, " r"],
) -> PromptNotes:
    """The notes with the share of its attention that the last query of the rows `asked` has on the blocks opened."""
    newest = jnp.take_along_axis(q, jnp.maximum(chunk.count - 1, 0)[:, None, None, None], axis=1)[:, 0]
    length = jnp.where(asked, chunk.start + chunk.count, 0)
    there = jnp.arange(opened.shape[2]) < held_blocks(length, plant.page_size)[:, None, None]
    blocks, counts = list_blocks(jnp.broadcast_to(there, opened.shape))
    _, mass = paged_attention(
        newest,
        cached.pages,
        chunk.table,
        blocks,
        counts,
        length,
        softmax=plant.softmax(layer),
        backend=plant.backend,
    )
    by_head = jnp.repeat(opened, mass.shape[1] // opened.shape[1], axis=1)
    kept = log_sum_exp(jnp.where(by_head, mass, -jnp.inf)) - log_sum_exp(mass)
    share = jnp.where(asked, total(jnp.exp(jnp.where(asked[:, None], kept, -jnp.inf))), 0.0)
    num = jnp.where(asked, float(mass.shape[1]), 0.0)
    assert notes.mass is not None and notes.num_probes is not None
    return replace(
        notes,
        mass=notes.mass.at[chunk.slot].add(share),
        num_probes=notes.num_probes.at[chunk.slot].add(num),
    )

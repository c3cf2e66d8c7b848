"""Prompts read under a budget: each segment's queries attend to the blocks chosen for it, head by head.

A segment is a row of prefill, whatever stands beside it. What a budget keeps of a prompt goes from row to row within a
layer, and from call to call in `ControlState.prompt`.
"""

from collections.abc import Hashable
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.budget import Budget, PromptRecord
from et_jax.control.segment import Segment, interval, observed
from et_jax.decode.attention.blocks import held_blocks
from et_jax.decode.attention.reading import list_blocks
from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.models.stacks import Layer, by_layer, folded
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.softmax import Softmax
from et_jax.sums import log_sum_exp, total
from et_jax.types import pytree, replace, static


@pytree
class Budgeted:
    """Reads of each row, a segment of a prompt, what a budget chooses; rows that are `last` end their prompt.

    Its `notes` are those of every slot.
    """

    budget: Budget
    last: Bool[Array, " r"]
    records: PromptRecord

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return of every layer whether it is read sparsely."""
        layers = range(plant.model.num_layers)
        return tuple(i >= self.budget.dense_layers and plant.model.windows[i] is None for i in layers)

    def of_layer(self, plant: Plant, layer: Layer) -> "BudgetedOfLayer":
        """Return the reader of a layer."""
        sparse = bool(self.kinds(plant)[layer.like])
        return BudgetedOfLayer(
            budget=self.budget,
            last=self.last,
            state=layer.of(self.records.state, axis=1),
            layer=jnp.asarray(layer.number, jnp.int32),
            sparse=sparse,
            probed=sparse and self.records.mass is not None,
        )

    def recorded(self, plant: Plant, chunk: Chunk, records: tuple[Any, ...]) -> PromptRecord:
        """Return the notes of every slot with what the rows read."""

        def add(sofar: PromptRecord, one: SegmentsRead) -> PromptRecord:
            read = sofar.blocks_read.at[chunk.slot].add(one.blocks_read)
            sofar = replace(sofar, blocks_read=read, blocks_held=sofar.blocks_held.at[chunk.slot].add(one.blocks_held))
            if one.probe is None or sofar.mass is None or sofar.num_probes is None:
                return sofar
            layer, share, num_probes = one.probe
            return replace(
                sofar,
                mass=sofar.mass.at[chunk.slot, layer].add(share),
                num_probes=sofar.num_probes.at[chunk.slot].add(num_probes),
            )

        return replace(folded(records, add, self.records), state=by_layer(records, attrgetter("kept"), axis=1))


@pytree
class SegmentsRead:
    """What the rows read of one layer: blocks, of those there were, over KV heads, and what the budget `kept` of slots.

    `probe` is the layer, the share of its attention that the last query of each row had on the blocks read, summed over
    query heads, and how many heads these are; None where nothing was left out, or no one asks.
    """

    state: Any
    blocks_read: Float[Array, " r"]
    blocks_held: Float[Array, " r"]
    probe: tuple[Int[Array, ""], Float[Array, " r"], Float[Array, " r"]] | None


@pytree
class BudgetedOfLayer:
    """Reads segments of prompts in one layer as a budget chooses; `kept` is what it keeps of every slot's.

    A layer that is not `sparse` is read whole. `probed` asks for the `probe` of `SegmentsRead`.
    """

    budget: Budget
    last: Bool[Array, " r"]
    state: Any
    layer: Int[Array, ""]
    sparse: bool = static()
    probed: bool = static()

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return that rows are read one by one."""
        return False

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "r t h d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "r t h d"], SegmentsRead]:
        """Return attention to the blocks chosen, and what they are."""
        budget, page_size = self.budget, plant.page_size
        num_blocks = held_blocks(chunk.start + chunk.count, page_size)
        block = jnp.arange(chunk.table.shape[1], dtype=jnp.int32)
        held = (block < num_blocks[:, None]) & (chunk.count > 0)[:, None]
        own = held & (block >= (chunk.start // page_size)[:, None])
        whole = self.last | (chunk.start < budget.dense_until)
        stored = {"kv_scales": cached.kv_scales, "backend": plant.backend}
        attend = partial(paged_prefill, q, cached.pages, chunk.table, chunk.start, softmax=softmax, **stored)
        held_by_heads = jnp.broadcast_to(held[:, None], (len(held), plant.model.num_kv_heads, held.shape[1]))
        if not self.sparse:
            return attend()[0], _read(self.state, held_by_heads, held_by_heads, None)
        opened, state = self._choose(plant, softmax, chunk, q, cached, held & ~own)
        opened = jnp.where(whole[:, None, None], held[:, None], opened | own[:, None])
        blocks, counts = list_blocks(opened)
        probe = None
        if self.probed:
            probe = self.layer, *_probe(plant, softmax, chunk, q, cached, opened, ~whole & (chunk.count > 0))
        return attend(blocks=blocks, counts=counts)[0], _read(state, opened, held_by_heads, probe)

    def _choose(
        self,
        plant: Plant,
        softmax: Softmax,
        chunk: Chunk,
        q: Float[Array, "r t h d"],
        cached: LayerCache,
        visible: Bool[Array, "r n"],
    ) -> tuple[Bool[Array, "r k n"], Any]:
        """The blocks before each row that its queries read, row by row, for a slot's rows follow on each other."""
        budget, (r, t, _, d), scale = self.budget, q.shape, softmax.scale
        grouped = q.astype(jnp.float32).reshape(r, t, plant.model.num_kv_heads, -1, d)
        box = cached.summaries.key_box[:, chunk.table].swapaxes(0, 1).astype(jnp.float32)
        # what no row may see can hold anything, and 0 * NaN is NaN
        box = jnp.where(visible[:, None, :, None], box, 0.0)
        low, high = box[..., :d], box[..., d : 2 * d]
        real = jnp.arange(t) < chunk.count[:, None]
        score = jax.vmap(observed)(grouped, real, low, high) * scale
        bounds = None
        if budget.needs_interval:
            bounds = jax.vmap(partial(interval, group=plant.page_size))(grouped * scale, real, low, high)

        def one(every: Any, row: tuple) -> tuple[Any, Bool[Array, "k n"]]:
            slot, start, count, visible, score, bounds = row
            segment = Segment(
                score=score,
                visible=visible,
                interval=bounds,
                index=start // t,
                layer=self.layer,
                block_size=plant.page_size,
                scale=scale,
            )
            opened, state = budget.choose(segment, jax.tree.map(lambda x: x[slot], every))
            put = jax.tree.map(
                lambda old, new: old.at[jnp.where(count > 0, slot, len(old))].set(new, mode="drop"), every, state
            )
            return put, opened

        rows = chunk.slot, chunk.start, chunk.count, visible, score, bounds
        state, opened = jax.lax.scan(one, self.state, rows)
        return opened, state


def _read(
    state: Any,
    opened: Bool[Array, "r k n"],
    held: Bool[Array, "r k n"],
    probe: tuple[Int[Array, ""], Float[Array, " r"], Float[Array, " r"]] | None,
) -> SegmentsRead:
    """The notes of a layer in which these blocks were read."""
    read, there = (jnp.sum(x, axis=(1, 2), dtype=jnp.int32).astype(jnp.float32) for x in (opened, held))
    return SegmentsRead(state=state, blocks_read=read, blocks_held=there, probe=probe)


def _probe(
    plant: Plant,
    softmax: Softmax,
    chunk: Chunk,
    q: Float[Array, "r t h d"],
    cached: LayerCache,
    opened: Bool[Array, "r k n"],
    asked: Bool[Array, " r"],
) -> tuple[Float[Array, " r"], Float[Array, " r"]]:
    """What the last query of the rows `asked` has of its attention on the blocks opened, as `SegmentsRead.probe`."""
    newest = jnp.take_along_axis(q, jnp.maximum(chunk.count - 1, 0)[:, None, None, None], axis=1)[:, 0]
    length = jnp.where(asked, chunk.start + chunk.count, 0)
    there = jnp.arange(opened.shape[2]) < held_blocks(length, plant.page_size)[:, None, None]
    blocks, counts = list_blocks(jnp.broadcast_to(there, opened.shape))
    stored = {"kv_scales": cached.kv_scales, "backend": plant.backend}
    _, mass = paged_attention(newest, cached.pages, chunk.table, blocks, counts, length, softmax=softmax, **stored)
    assert mass is not None
    by_head = jnp.repeat(opened, mass.shape[1] // opened.shape[1], axis=1)
    state = log_sum_exp(jnp.where(by_head, mass, -jnp.inf)) - log_sum_exp(mass)
    share = jnp.where(asked, total(jnp.exp(jnp.where(asked[:, None], state, -jnp.inf))), 0.0)
    return share, jnp.where(asked, float(mass.shape[1]), 0.0)

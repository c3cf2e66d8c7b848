"""Prompts read under a budget: each segment's queries attend to the blocks selected for it, head by head.

A segment is a row of prefill. The budget's state of a prompt passes from row to row within a
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
from et_jax.control.segment import Segment, observed
from et_jax.decode.attention.blocks import count_blocks
from et_jax.decode.attention.reading import list_blocks
from et_jax.decode.attention.summaries import of_blocks
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
    """Attention of prompt segments, one a row, to the blocks that a budget selects; `last` rows end their prompt.

    `records` are those of every slot.
    """

    budget: Budget
    last: Bool[Array, " r"]
    records: PromptRecord

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return whether each layer's attention is sparse."""
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
        """Return the records of every slot, updated by the rows."""

        def add(sofar: PromptRecord, one: SegmentsRead) -> PromptRecord:
            read, there = (jnp.sum(x, axis=1).astype(jnp.float32) for x in (one.blocks_read, one.blocks_held))
            sofar = replace(
                sofar,
                blocks_read=sofar.blocks_read.at[chunk.slot].add(read),
                blocks_held=sofar.blocks_held.at[chunk.slot].add(there),
            )
            if one.probe is None or sofar.mass is None or sofar.num_probes is None:
                return sofar
            share, num_probes = one.probe.share, jnp.sum(one.probe.num_heads, axis=1)
            return replace(
                sofar,
                mass=sofar.mass.at[chunk.slot, one.probe.layer].add(total(share)),
                num_probes=sofar.num_probes.at[chunk.slot].add(num_probes),
            )

        return replace(folded(records, add, self.records), state=by_layer(records, attrgetter("state"), axis=1))


@pytree
class SegmentsRead:
    """The record of one layer: the budget's `state` of every slot, and of each row the blocks read and those in total.

    `probe` is None with full attention, or unless requested.
    """

    state: Any
    blocks_read: Int[Array, "r k"]
    blocks_held: Int[Array, "r k"]
    probe: "Probe | None"


@pytree
class Probe:
    """The share of a layer's attention that the last query of each row had on the blocks read.

    It is summed over the `num_heads` query heads of each KV head, both 0 in rows that are not probed.
    """

    layer: Int[Array, ""]
    share: Float[Array, "r k"]
    num_heads: Float[Array, "r k"]


@pytree
class BudgetedOfLayer:
    """Attention of prompt segments in one layer to the blocks that a budget selects; `state` is that of every slot.

    A layer that is not `sparse` uses full attention. `probed` requests the `probe` of `SegmentsRead`.
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
        """Return attention to the selected blocks, and the record of them."""
        budget, page_size = self.budget, plant.page_size
        num_blocks = count_blocks(chunk.start + chunk.count, page_size)
        block = jnp.arange(chunk.table.shape[1], dtype=jnp.int32)
        valid = (block < num_blocks[:, None]) & (chunk.count > 0)[:, None]
        own = valid & (block >= (chunk.start // page_size)[:, None])
        full = self.last | (chunk.start < budget.dense_until)
        stored = {"kv_scales": cached.kv_scales, "backend": plant.backend}
        attend = partial(paged_prefill, q, cached.pages, chunk.table, chunk.start, softmax=softmax, **stored)
        valid_by_head = jnp.broadcast_to(valid[:, None], (len(valid), plant.model.num_kv_heads, valid.shape[1]))
        if not self.sparse:
            return attend()[0], _read(self.state, valid_by_head, valid_by_head, None)
        opened, state = self._choose(plant, softmax, chunk, q, cached, valid & ~own)
        opened = jnp.where(full[:, None, None], valid[:, None], opened | own[:, None])
        blocks, counts = list_blocks(opened)
        probe = None
        if self.probed:
            probe = self._probe(plant, softmax, chunk, q, cached, opened, ~full & (chunk.count > 0))
        return attend(blocks=blocks, counts=counts)[0], _read(state, opened, valid_by_head, probe)

    def _choose(
        self,
        plant: Plant,
        softmax: Softmax,
        chunk: Chunk,
        q: Float[Array, "r t h d"],
        cached: LayerCache,
        visible: Bool[Array, "r n"],
    ) -> tuple[Bool[Array, "r k n"], Any]:
        """Return the blocks before each row that its queries read, row by row, because a slot's rows are sequential."""
        budget, (r, t, _, d), scale = self.budget, q.shape, softmax.scale
        grouped = q.astype(jnp.float32).reshape(r, t, plant.model.num_kv_heads, -1, d)
        box = of_blocks(cached.summaries.key_box, chunk.table).astype(jnp.float32)
        # pages that no row attends to may contain anything, and 0 * NaN is NaN
        box = jnp.where(visible[:, None, :, None], box, 0.0)
        low, high = box[..., :d], box[..., d : 2 * d]
        real = jnp.arange(t) < chunk.count[:, None]
        score = jax.vmap(observed)(grouped, real, low, high) * scale

        def one(every: Any, row: tuple) -> tuple[Any, Bool[Array, "k n"]]:
            slot, start, count, visible, score = row
            segment = Segment(
                score=score,
                visible=visible,
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

        rows = chunk.slot, chunk.start, chunk.count, visible, score
        state, opened = jax.lax.scan(one, self.state, rows)
        return opened, state

    def _probe(
        self,
        plant: Plant,
        softmax: Softmax,
        chunk: Chunk,
        q: Float[Array, "r t h d"],
        cached: LayerCache,
        opened: Bool[Array, "r k n"],
        asked: Bool[Array, " r"],
    ) -> Probe:
        """Return the share of attention that the last query of the rows `asked` has on the opened blocks."""
        newest = jnp.take_along_axis(q, jnp.maximum(chunk.count - 1, 0)[:, None, None, None], axis=1)[:, 0]
        length = jnp.where(asked, chunk.start + chunk.count, 0)
        there = jnp.arange(opened.shape[2]) < count_blocks(length, plant.page_size)[:, None, None]
        blocks, counts = list_blocks(jnp.broadcast_to(there, opened.shape))
        stored = {"kv_scales": cached.kv_scales, "backend": plant.backend}
        _, mass = paged_attention(newest, cached.pages, chunk.table, blocks, counts, length, softmax=softmax, **stored)
        assert mass is not None
        group = mass.shape[1] // opened.shape[1]
        by_head = jnp.repeat(opened, group, axis=1)
        log_share = log_sum_exp(jnp.where(by_head, mass, -jnp.inf)) - log_sum_exp(mass)
        share = total(jnp.exp(jnp.where(asked[:, None], log_share, -jnp.inf)).reshape(*opened.shape[:2], group))
        asked = jnp.broadcast_to(asked[:, None], share.shape)
        share, num_heads = jnp.where(asked, share, 0.0), jnp.where(asked, float(group), 0.0)
        return Probe(layer=self.layer, share=share, num_heads=num_heads)


def _read(
    state: Any,
    opened: Bool[Array, "r k n"],
    valid: Bool[Array, "r k n"],
    probe: Probe | None,
) -> SegmentsRead:
    """Return the record of a layer in which these blocks were read."""
    read, there = (jnp.sum(x, axis=2, dtype=jnp.int32) for x in (opened, valid))
    return SegmentsRead(state=state, blocks_read=read, blocks_held=there, probe=probe)

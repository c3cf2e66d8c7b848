"""How a chunk reads the cache: whole, or row by row what selectors choose.

This is where the cache, the selectors and the kernels meet.
"""

from collections.abc import Hashable
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import num_words
from et_jax.control.selector import Selection, Selector
from et_jax.decode.cache import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.draft import Pruned
from et_jax.decode.once import run_if
from et_jax.decode.plant import Plant
from et_jax.decode.pruned import Noting, heavy_of
from et_jax.decode.reading import read_all, read_chosen
from et_jax.decode.reads import AllRead, ByHead, LayerReads, ReadStats, chosen_reads, reads_of, written_out
from et_jax.decode.selection import (
    Blocks,
    Chosen,
    Kept,
    LayerKind,
    Stored,
    blocks_of,
    chosen_of,
    held_blocks,
    read_of,
    selection_of,
    stored_of,
    widened,
    with_residual,
)
from et_jax.models.stacks import Layer, by_layer
from et_jax.pallas.backend import platform
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.pallas.per_head import PerHead, PerQuery, PerRow, per_head
from et_jax.softmax import Softmax
from et_jax.types import Table, pytree, replace, static


@pytree
class Whole:
    """Reads everything, of chunks of any length, and notes nothing; every layer is read alike."""

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return that all layers are read alike."""
        return (None,) * plant.model.num_layers

    def of_layer(self, plant: Plant, layer: Layer) -> "Whole":
        """Return the reader of a layer."""
        return self

    def noted(self, plant: Plant, chunk: Chunk, notes: tuple[Any, ...]) -> None:
        """Return no notes."""

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
    ) -> tuple[Float[Array, "r t h d"], None]:
        """Return attention to all there is."""
        if q.shape[1] == 1:
            out, _ = read_all(plant, softmax, q[:, 0], cached, replace(chunk, at=None))
            return out[:, None], None
        stored = {"kv_scales": cached.kv_scales, "backend": plant.backend}
        out, _ = paged_prefill(q, cached.pages, chunk.table, chunk.start, softmax=softmax, **stored)
        return out, None


@pytree
class Selected:
    """Reads of each row, of one token, the blocks that its layer's selector chooses, and notes what that was.

    Blocks are chosen anew every `refresh_every` tokens: where a row is not `fresh`, the blocks of `block_mask`, those
    last read, are read again; `kept_mass` is what was kept then. `selectors` are those of every layer, their numbers
    with a row each. A row of fewer than `min_context` tokens reads all, and nothing is scored for it; None scores every
    row. What does not choose, for no row is that long (`chooses`), has nothing to score with. `skipped` counts the
    blocks at the beginning that a KV head holds nothing of, None where each holds all. `block_mass` is what share each
    query head had on each block when that was last read; None where no selector goes by it. `residual` lets unread
    blocks count as their mean. `sensitivity` is that of the model's heads, where it has been measured. Where the model
    drafts for itself, `pruned`, the blocks that held the mass are noted as `noting` says, in pages of `page_size`.
    """

    tolerance: Float[Array, " r"]
    fresh: Bool[Array, " r"]
    block_mask: UInt32[Array, "r l k n32"]
    kept_mass: Float[Array, " r"]
    selectors: tuple[Selector, ...]
    min_context: Int[Array, " r"] | None = None
    skipped: Int[Array, "r l k"] | None = None
    block_mass: Float[Array, "r l h n"] | None = None
    refresh_every: int = static(default=1)
    residual: bool = static(default=False)
    sensitivity: Table | None = static(default=None)
    noting: Noting | None = None
    pruned: Pruned | None = static(default=None)
    page_size: int = static(default=0)
    chooses: bool = static(default=True)

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return what the selector of every layer is told by: its structure, and the very numbers that it has."""
        return tuple((jax.tree.structure(one), *map(id, jax.tree.leaves(one))) for one in self.selectors)

    def of_layer(self, plant: Plant, layer: Layer) -> "AllOfLayer | SelectedOfLayer":
        """Return the reader of a layer."""
        selector, mass = self.selectors[layer.like], layer.of(self.block_mass, axis=1)
        if selector.reads_all:
            return AllOfLayer(skipped=layer.of(self.skipped, axis=1), mass=mass, noting=self.noting)
        sensitivity = None
        if self.sensitivity is not None:
            of_layers = (self.sensitivity.array * self.sensitivity.array.size).astype(np.float32)
            sensitivity = jnp.asarray(layer.of(of_layers, axis=0))[None]
        return SelectedOfLayer(
            tolerance=self.tolerance,
            fresh=self.fresh,
            last=layer.of(self.block_mask, axis=1),
            selector=selector,
            min_context=self.min_context,
            mass=mass,
            sensitivity=sensitivity,
            refresh_every=self.refresh_every,
            residual=self.residual,
            noting=self.noting,
            chooses=self.chooses,
        )

    def noted(self, plant: Plant, chunk: Chunk, notes: tuple[Any, ...]) -> ReadStats:
        """Return what was read of all layers."""
        lengths = chunk.lengths
        notes, long = written_out(plant, chunk, self.skipped, notes), _long(self, lengths)
        kept_mass = jnp.where(long, self.kept_mass, 1.0)
        summaries = held_blocks(lengths, plant.page_size) * plant.model.num_kv_heads
        stats = replace(
            chosen_reads(notes, self.fresh & long, kept_mass, summaries),
            block_masks=by_layer(notes, attrgetter("block_mask"), axis=1),
            block_masses=by_layer(notes, attrgetter("block_mass"), axis=1),
        )
        stats = replace(stats, blocks_read=jnp.sum(stats.reads, axis=(1, 2), dtype=jnp.int32))
        if self.pruned is None:
            return stats
        if self.noting is None:
            return replace(stats, heavy_blocks=jnp.zeros_like(stats.block_masks))
        held = held_blocks(self.noting.of(lengths), self.page_size)
        told = tuple(
            jax.tree.map(attrgetter("block_lse"), note, is_leaf=lambda x: isinstance(x, LayerReads)) for note in notes
        )
        return replace(stats, heavy_blocks=heavy_of(self.pruned, self.noting, told, held, stats.block_masks))


@pytree
class AllOfLayer:
    """Reads all of a layer, one token a row. `skipped` and `mass` are what `Selected` has of the layer.

    The log-sum-exp of each block is noted of the rows that `noting` names.
    """

    skipped: Int[Array, "r k"] | None
    mass: Float[Array, "r h n"] | None
    noting: Noting | None

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return whether the kernel reads a page once for all rows of a slot."""
        return plant.reads_together(softmax, chosen=False)

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "n 1 h d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "_ 1 h d"], LayerReads | AllRead]:
        """Return attention to all there is, and that it was read."""
        out, block_lse = read_all(plant, softmax, q[:, 0], cached, chunk, self.skipped)
        if self.mass is None and self.noting is None:
            return out[:, None], AllRead(window=softmax.window)
        table, blocks = chunk.table, blocks_of(chunk.table, chunk.lengths, plant.page_size, softmax.window)
        opened = jnp.broadcast_to(blocks.readable[:, None], (len(table), plant.model.num_kv_heads, table.shape[1]))
        if self.skipped is not None:
            opened &= jnp.arange(table.shape[1]) >= self.skipped[..., None]
        lse = None
        if self.noting is not None:
            lse = self.noting.of(block_lse[: len(table)])
            if self.skipped is not None:
                lse = _by_block(lse, self.noting.of(self.skipped))
            if softmax.window is not None:
                lse = jnp.full((*lse.shape[:2], opened.shape[2]), -jnp.inf)
        return out[:, None], reads_of(opened, self.mass, lse)


@pytree
class SelectedOfLayer:
    """Reads the blocks of a layer that its `selector` chooses, one token a row: `Selected`, of one layer.

    `last` packs the blocks read last, `mass` is what share each query head had on each block. `noting` as `AllOfLayer`.
    """

    tolerance: Float[Array, " r"]
    fresh: Bool[Array, " r"]
    last: UInt32[Array, "r k n32"]
    selector: Selector
    min_context: Int[Array, " r"] | None
    mass: Float[Array, "r h n"] | None
    sensitivity: Float[Array, "1 k g"] | None
    noting: Noting | None
    refresh_every: int = static()
    residual: bool = static()
    chooses: bool = static()

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return whether the kernel reads a page once for all rows of a slot."""
        return plant.reads_together(softmax, chosen=True)

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "n 1 h d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "r 1 h d"], LayerReads]:
        """Return attention to the blocks chosen, and what they are."""
        lengths, queries = chunk.lengths, q[: len(chunk.token), 0]
        grouped = _grouped(queries, plant, softmax)
        blocks = blocks_of(widened(chunk.table), lengths, plant.page_size, softmax.window)
        scored = self.fresh & _long(self, lengths)
        chosen = self._choose(plant, softmax, grouped, cached, surprisal, blocks, scored)
        num_blocks = chunk.table.shape[1]
        listed, opened = chosen.listed[..., :num_blocks], chosen.opened[..., :num_blocks]
        out, block_lse = read_chosen(
            plant, softmax, queries, cached, chunk.table, listed, chosen.count, opened, lengths, chunk.at
        )
        by_list = block_lse.reshape(*grouped.shape[:3], -1)
        sinks = None if softmax.sink_logits is None else softmax.sink_logits.reshape(grouped.shape[1:3])
        read = read_of(chosen, blocks, by_list, sinks, _kind(plant, softmax), residual=self.residual)
        mass = self.mass
        if mass is not None and read.mass is not None:
            known = read.mass[..., :num_blocks].reshape(mass.shape)
            mass = known if self.refresh_every == 1 else jnp.where(self.fresh[:, None, None], known, mass)
        if read.residual is not None:
            attended = out.astype(jnp.float32).reshape(grouped.shape)
            mixed = with_residual(attended, read.residual, blocks, cached.summaries.mean)
            out = mixed.astype(out.dtype).reshape(out.shape)
        lse = None
        if self.noting is not None:
            noted = self.noting.of(opened)
            place = jnp.where(noted, jnp.cumsum(noted, axis=-1, dtype=jnp.int32) - 1, block_lse.shape[-1])
            place = jnp.repeat(place, plant.model.group_size, axis=1)
            lse = jnp.take_along_axis(self.noting.of(block_lse), place, axis=-1, mode="fill", fill_value=-jnp.inf)
        heads = ByHead(kept=read.kept.reshape(len(lengths), -1), entropy=chosen.entropy.reshape(len(lengths), -1))
        mask = chosen.mask[..., : num_words(num_blocks)]
        return out[:, None], LayerReads(block_mask=mask, block_mass=mass, by_head=heads, block_lse=lse)

    def _choose(
        self,
        plant: Plant,
        softmax: Softmax,
        query: Float[Array, "r k g d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        blocks: Blocks,
        scored: Bool[Array, " r"],
    ) -> Chosen:
        """The layer's blocks, chosen anew for the rows that are `scored`.

        A row shorter than its `min_context` reads all; one that is not `fresh` reads the blocks it read last, and the
        one being written. Where no row is scored, a CPU and a TPU score nothing. A GPU would wait for the host to learn
        that: it scores rows of no tokens.
        """
        layer = _kind(plant, softmax)
        always = self.chooses and self.refresh_every == 1 and self.min_context is None
        by_kernel = platform() == "gpu"
        kept = None
        if not always:
            last = None if self.refresh_every == 1 else PerHead(array=self.last)
            kept = Kept(
                long=PerRow(array=_long(self, blocks.length).astype(jnp.int32)),
                fresh=PerRow(array=self.fresh.astype(jnp.int32)),
                last=last,
            )

        def known(given: tuple) -> Stored:
            query, blocks, mass = given
            length = blocks.length
            if mass is not None:
                beyond = blocks.table.shape[1] - mass.shape[-1]  # of a table that is widened
                mass = jnp.pad(mass, ((0, 0), (0, 0), (0, beyond)), constant_values=1.0).reshape(*query.shape[:3], -1)
            if by_kernel and not always:
                blocks = replace(blocks, length=jnp.where(scored, length, 0))
            stored = stored_of(query, cached, surprisal, blocks, self.tolerance, plant.scores_backend, layer)
            return replace(
                stored,
                length=PerRow(array=length),
                last_mass=None if mass is None else PerQuery(array=mass),
                sensitivity=None if self.sensitivity is None else PerQuery(array=self.sensitivity),
            )

        given, with_place = (query, blocks, self.mass), self.mass is not None
        length, selector = PerRow(array=blocks.length), jax.tree.map(lambda number: PerRow(array=number), self.selector)
        most_held = None if by_kernel else blocks.most_held

        def select(given: tuple) -> Selection:
            return per_head(partial(selection_of, layer, most_held), selector, known(given))

        shapes = jax.eval_shape(select, given)
        if self.refresh_every > 1 and shapes.upper is not None:
            raise ValueError("refresh_every: a certified selector proves something of this token's query alone; use 1")
        if always or (by_kernel and self.chooses):

            def both(selector: Selector, stored: Stored, kept: Kept | None) -> Chosen:
                chosen = selection_of(layer, most_held, selector, stored)
                return chosen_of(layer, with_place, chosen, stored.length, kept)

            return per_head(both, selector, known(given), kept)
        chosen = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if self.chooses:
            chosen = run_if(jnp.any(scored), lambda _, given: select(given), chosen, given)

        def settled(opened: Array, estimate: Array, upper: Array | None, length: Array, kept: Kept | None) -> Chosen:
            own = Selection(opened=opened, estimate=estimate, upper=upper, shares=chosen.shares)
            return chosen_of(layer, with_place, own, length, kept)

        upper = None if chosen.upper is None else PerQuery(array=chosen.upper)
        return per_head(settled, PerHead(array=chosen.opened), PerQuery(array=chosen.estimate), upper, length, kept)


def _long(reader: Selected | SelectedOfLayer, lengths: Int[Array, " r"]) -> Bool[Array, " r"]:
    """Whether rows are long enough for blocks to be chosen."""
    if not reader.chooses:
        return jnp.zeros_like(lengths, bool)
    return jnp.ones_like(lengths, bool) if reader.min_context is None else lengths >= reader.min_context


def _by_block(block_lse: Float[Array, "s h n"], skipped: Int[Array, "s k"]) -> Float[Array, "s h n"]:
    """What is in order from the first block that each KV head holds, in the order of all blocks; -inf before it."""
    (_, h, n), heads = block_lse.shape, skipped.shape[1]
    place = jnp.arange(n, dtype=jnp.int32) - skipped[..., None]
    place = jnp.repeat(jnp.where(place < 0, n, place), h // heads, axis=1)
    return jnp.take_along_axis(block_lse, place, axis=-1, mode="fill", fill_value=-jnp.inf)


def _kind(plant: Plant, softmax: Softmax) -> LayerKind:
    return LayerKind(page_size=plant.page_size, window=softmax.window, soft_cap=softmax.soft_cap)


def _grouped(queries: Float[Array, "r h d"], plant: Plant, softmax: Softmax) -> Float[Array, "r k g d"]:
    """Queries by KV head, float32, scaled so that query . key is the score."""
    r, _, d = queries.shape
    return queries.astype(jnp.float32).reshape(r, plant.model.num_kv_heads, -1, d) * softmax.scale

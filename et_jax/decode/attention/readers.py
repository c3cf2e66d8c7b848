"""Readers: how a chunk attends to the cache, fully, or row by row to the blocks that selectors choose.

This is where the cache, the selectors and the kernels meet.
"""

from collections.abc import Hashable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.selector import Selector
from et_jax.decode.attention.block_sparse import BlockSparseLayer, long_rows
from et_jax.decode.attention.blocks import blocks_of, count_blocks
from et_jax.decode.attention.pruned import RecordedRows, heavy_of
from et_jax.decode.attention.reading import read_all
from et_jax.decode.attention.reads import AllRead, LayerReads, ReadStats, reads_of, selected_reads, written_out
from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.drafting.drafts import Pruned
from et_jax.decode.plant import Plant
from et_jax.models.stacks import Layer, by_layer
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.pallas.per_head import PerQuery
from et_jax.softmax import Softmax
from et_jax.types import Table, pytree, replace, static


@pytree
class FullAttention:
    """Full attention, for chunks of any length; records nothing, and all layers share a program."""

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return equal values: all layers are read by one program."""
        return (None,) * plant.model.num_layers

    def of_layer(self, plant: Plant, layer: Layer) -> "FullAttention":
        """Return the reader of a layer."""
        return self

    def recorded(self, plant: Plant, chunk: Chunk, records: tuple[Any, ...]) -> None:
        """Return no record."""

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return False: rows are read one by one."""
        return False

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "r t c d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "r t h d"], None]:
        """Return attention to all cached tokens."""
        if q.shape[1] == 1:
            out, _ = read_all(plant, softmax, q[:, 0], cached, replace(chunk, at=None), block_sums=False)
            return out[:, None], None
        stored = {"kv_scales": cached.kv_scales, "backend": plant.backend}
        out, _ = paged_prefill(q, cached.pages, chunk.table, chunk.start, softmax=softmax, **stored)
        return out, None


@pytree
class BlockSparse:
    """Block-sparse attention of rows of one token to the blocks that each layer's selector chooses; records them.

    A row without `refresh` reads the blocks of `block_mask`, the last ones, again. None selects for every row.
    `selectors` are those of every layer, their numbers with an entry per row. A row of fewer than `min_context` tokens
    uses full attention without scores; None scores every row. A layer with a window uses full attention for rows much
    longer than it. Without `chooses` no row is that long, and the program contains no selection. `skipped` counts the
    leading blocks in which a KV head has no entries, None if all heads have all. `block_mass` is the share of each
    query head on each block when it was last read; None if no selector uses it. With `residual` unread blocks count as
    their mean. `sensitivity` is that of the model's heads, if it was measured. If the model self-drafts, `pruned`, the
    heavy blocks of `recorded_rows` are recorded, in pages of `page_size`.
    """

    tolerance: Float[Array, " r"]
    block_mask: UInt32[Array, "r l k n32"]
    selectors: tuple[Selector, ...]
    min_context: Int[Array, " r"] | None = None
    skipped: Int[Array, "r l k"] | None = None
    block_mass: Float[Array, "r l h n"] | None = None
    refresh: Bool[Array, " r"] | None = None
    residual: bool = static(default=False)
    sensitivity: Table | None = static(default=None)
    recorded_rows: RecordedRows | None = None
    pruned: Pruned | None = static(default=None)
    page_size: int = static(default=0)
    chooses: bool = static(default=True)

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return what identifies the selector of every layer: its structure, and the identities of its numbers."""
        return tuple((jax.tree.structure(one), *map(id, jax.tree.leaves(one))) for one in self.selectors)

    def of_layer(self, plant: Plant, layer: Layer) -> "FullAttentionLayer | BlockSparseLayer":
        """Return the reader of a layer."""
        selector, mass = self.selectors[layer.like], layer.of(self.block_mass, axis=1)
        if selector.reads_all:
            return FullAttentionLayer(
                skipped=layer.of(self.skipped, axis=1), mass=mass, recorded_rows=self.recorded_rows
            )
        sensitivity = None
        if self.sensitivity is not None:
            of_layers = (self.sensitivity.array * self.sensitivity.array.size).astype(np.float32)
            if isinstance(layer.number, int):
                sensitivity = PerQuery(array=jnp.asarray(of_layers[layer.number])[None])
            else:  # a GPU's kernel finds the layer itself
                sensitivity = PerQuery(array=jnp.asarray(of_layers), layer=layer.number.reshape(1))
        return BlockSparseLayer(
            tolerance=self.tolerance,
            last=layer.of(self.block_mask, axis=1),
            selector=selector,
            min_context=self.min_context,
            mass=mass,
            sensitivity=sensitivity,
            refresh=self.refresh,
            residual=self.residual,
            recorded_rows=self.recorded_rows,
            chooses=self.chooses,
        )

    def recorded(self, plant: Plant, chunk: Chunk, records: tuple[Any, ...]) -> ReadStats:
        """Return the blocks read, over all layers."""
        lengths = chunk.lengths
        records = written_out(plant, chunk, self.skipped, records)
        long = long_rows(self.chooses, self.min_context, lengths)
        scored = long if self.refresh is None else long & self.refresh
        summaries = count_blocks(lengths, plant.page_size) * plant.model.num_kv_heads
        stats = replace(
            selected_reads(records, long, scored, summaries),
            block_masks=by_layer(records, attrgetter("block_mask"), axis=1),
            block_masses=by_layer(records, attrgetter("block_mass"), axis=1),
        )
        stats = replace(stats, blocks_read=jnp.sum(stats.reads, axis=(1, 2), dtype=jnp.int32))
        if self.pruned is None:
            return stats
        if self.recorded_rows is None:
            return replace(stats, heavy_blocks=jnp.zeros_like(stats.block_masks))
        num_blocks = count_blocks(self.recorded_rows.of(lengths), self.page_size)
        block_lses = tuple(
            jax.tree.map(attrgetter("block_lse"), record, is_leaf=lambda x: isinstance(x, LayerReads))
            for record in records
        )
        return replace(
            stats, heavy_blocks=heavy_of(self.pruned, self.recorded_rows, block_lses, num_blocks, stats.block_masks)
        )


@pytree
class FullAttentionLayer:
    """Full attention of one layer, one token a row. `skipped` and `mass` are the layer's entries in `BlockSparse`.

    The log-sum-exps of the blocks are recorded for `recorded_rows`.
    """

    skipped: Int[Array, "r k"] | None
    mass: Float[Array, "r h n"] | None
    recorded_rows: RecordedRows | None

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return whether the kernel reads a page once for all rows of a slot."""
        return plant.reads_together(softmax, selected=False)

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "n 1 c d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "_ 1 h d"], LayerReads | AllRead]:
        """Return attention to all cached tokens, and the record of it."""
        block_sums = self.recorded_rows is not None
        out, block_lse = read_all(plant, softmax, q[:, 0], cached, chunk, self.skipped, block_sums)
        if self.mass is None and self.recorded_rows is None:
            return out[:, None], AllRead(window=softmax.window)
        table, blocks = chunk.table, blocks_of(chunk.table, chunk.lengths, plant.page_size, softmax.window)
        opened = jnp.broadcast_to(blocks.readable[:, None], (len(table), plant.model.num_kv_heads, table.shape[1]))
        if self.skipped is not None:
            opened &= jnp.arange(table.shape[1]) >= self.skipped[..., None]
        lse = None
        if self.recorded_rows is not None and block_lse is not None:
            lse = self.recorded_rows.of(block_lse[: len(table)])
            if self.skipped is not None:
                lse = _by_block(lse, self.recorded_rows.of(self.skipped))
            if softmax.window is not None:
                lse = jnp.full((*lse.shape[:2], opened.shape[2]), -jnp.inf)
        return out[:, None], reads_of(opened, self.mass, lse)


def _by_block(block_lse: Float[Array, "s h n"], skipped: Int[Array, "s k"]) -> Float[Array, "s h n"]:
    """Return sums ordered from the first valid block of each KV head in the order of all blocks; -inf before it."""
    (_, h, n), heads = block_lse.shape, skipped.shape[1]
    place = jnp.arange(n, dtype=jnp.int32) - skipped[..., None]
    place = jnp.repeat(jnp.where(place < 0, n, place), h // heads, axis=1)
    return jnp.take_along_axis(block_lse, place, axis=-1, mode="fill", fill_value=-jnp.inf)

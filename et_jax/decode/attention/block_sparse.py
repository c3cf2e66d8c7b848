"""Attention to the blocks of one layer that its selector chooses."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import num_words
from et_jax.control.selector import Selection, Selector
from et_jax.decode.attention.attended import attended_mass, with_residual
from et_jax.decode.attention.blocks import Blocks, LayerKind, blocks_of, widened
from et_jax.decode.attention.pruned import RecordedRows
from et_jax.decode.attention.reading import read_selected
from et_jax.decode.attention.reads import ByHead, LayerReads
from et_jax.decode.attention.selection import (
    Fallback,
    SelectedBlocks,
    SelectorInputs,
    selected_blocks,
    selection_of,
    selector_inputs,
)
from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.once import run_for
from et_jax.decode.plant import Plant
from et_jax.pallas.backend import platform
from et_jax.pallas.per_head import PerHead, PerQuery, PerRow, per_head
from et_jax.softmax import Softmax
from et_jax.types import pytree, replace, static

WINDOWS_SCORED = 2  # windows; a layer with a window scores no blocks of longer rows


@pytree
class _Rows:
    """The inputs of rows' selections in one layer. The layer's place in the cache is not in `blocks`."""

    query: Float[Array, "r k g d"]
    blocks: Blocks
    mass: Float[Array, "r h n"] | None
    tolerance: Float[Array, " r"]
    selector: Selector


@pytree
class BlockSparseLayer:
    """Attention of one layer, one token a row, to the blocks that its `selector` chooses: see `BlockSparse`.

    `last` packs the blocks read last, `mass` is the share of each query head on each block. `recorded_rows` is as in
    `FullAttentionLayer`.
    """

    tolerance: Float[Array, " r"]
    last: UInt32[Array, "r k n32"]
    selector: Selector
    min_context: Int[Array, " r"] | None
    mass: Float[Array, "r h n"] | None
    sensitivity: PerQuery | None
    recorded_rows: RecordedRows | None
    refresh: Bool[Array, " r"] | None
    residual: bool = static()
    chooses: bool = static()

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return whether the kernel reads a page once for all rows of a slot."""
        return plant.reads_together(softmax, selected=True)

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "n 1 c d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "_ 1 h d"], LayerReads]:
        """Return attention to the selected blocks, and the record of them."""
        lengths = chunk.lengths
        grouped = _grouped(q[: len(lengths), 0], plant, softmax)
        places = chunk.places
        wide = widened(chunk.table) if places is None else places.wide
        blocks = blocks_of(wide, lengths, plant.page_size, softmax.window)
        if places is not None and chunk.turn is not None:
            blocks = replace(blocks, turn=chunk.turn.reshape(1), depth=cached.depth, last=places.last)
        choosing = long_rows(self.chooses, self.min_context, lengths, softmax.window)
        scored = choosing if self.refresh is None else choosing & self.refresh
        selected = self._choose(plant, softmax, grouped, cached, surprisal, blocks, scored)
        num_blocks = chunk.table.shape[1]
        opened = selected.opened[..., :num_blocks]
        out, block_lse = read_selected(plant, softmax, q[:, 0], cached, chunk, selected.listed, selected.count, opened)
        block_lse = block_lse[: len(lengths)]
        by_list = block_lse.reshape(*grouped.shape[:3], -1)
        sinks = None if softmax.sink_logits is None else softmax.sink_logits.reshape(grouped.shape[1:3])
        masses = partial(attended_mass, sinks=sinks, layer=_kind(plant, softmax), residual=self.residual)
        renewed = lengths > 0 if self.refresh is None and platform() == "cpu" else self.refresh
        read = run_for(renewed, lambda given: masses(*given), (selected, lengths, by_list))
        mass = self.mass
        if mass is not None and read.mass is not None:
            known = read.mass[..., :num_blocks].reshape(mass.shape)
            mass = known if self.refresh is None else jnp.where(self.refresh[:, None, None], known, mass)
        if read.residual is not None:
            out = with_residual(out, read.residual, blocks, cached.summaries.mean)
        lse = None
        if self.recorded_rows is not None:
            attended = self.recorded_rows.of(opened)
            place = jnp.where(attended, jnp.cumsum(attended, axis=-1, dtype=jnp.int32) - 1, block_lse.shape[-1])
            place = jnp.repeat(place, plant.model.group_size, axis=1)
            lse = jnp.take_along_axis(
                self.recorded_rows.of(block_lse), place, axis=-1, mode="fill", fill_value=-jnp.inf
            )
        heads = ByHead(kept=read.kept.reshape(len(lengths), -1), entropy=selected.entropy.reshape(len(lengths), -1))
        if softmax.window is not None:
            heads = replace(heads, kept=jnp.where(choosing[:, None], heads.kept, 1.0), scored=scored)
        mask = selected.mask[..., : num_words(num_blocks)]
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
    ) -> SelectedBlocks:
        """Return the layer's blocks, selected again for the rows that are `scored`.

        A row outside `long_rows` uses full attention; one without `refresh` reads the blocks it read last,
        and the one being written. A GPU scores rows of no tokens in the place of those that are not scored.
        """
        layer, on_cpu, on_gpu = _kind(plant, softmax), platform() == "cpu", platform() == "gpu"
        all_long = self.min_context is None and softmax.window is None
        always = self.chooses and self.refresh is None and all_long and not on_cpu
        fallback = None
        if not always:
            long = long_rows(self.chooses, self.min_context, blocks.length, softmax.window)
            fallback = Fallback(
                long=PerRow(array=long.astype(jnp.int32)),
                refresh=None if self.refresh is None else PerRow(array=self.refresh.astype(jnp.int32)),
                last=None if self.refresh is None else PerHead(array=self.last),
            )
        turn, depth = blocks.turn, blocks.depth

        def known(rows: _Rows) -> SelectorInputs:
            blocks, mass, length = replace(rows.blocks, turn=turn, depth=depth), rows.mass, rows.blocks.length
            if mass is not None:
                beyond = blocks.table.shape[1] - mass.shape[-1]  # of a widened table
                mass = jnp.pad(mass, ((0, 0), (0, 0), (0, beyond)), constant_values=1.0)
                mass = mass.reshape(*rows.query.shape[:3], -1)
            if on_gpu and not always:
                blocks = replace(blocks, length=jnp.where(scored, length, 0))
            given = rows.query, cached, surprisal, blocks, rows.tolerance, plant.scores_backend, layer
            return replace(
                selector_inputs(*given),
                length=PerRow(array=length),
                last_mass=None if mass is None else PerQuery(array=mass),
                sensitivity=self.sensitivity,
            )

        def select(rows: _Rows) -> Selection:
            selector = jax.tree.map(lambda number: PerRow(array=number), rows.selector)
            most_blocks = rows.blocks.most_blocks if on_cpu else None
            return per_head(partial(selection_of, layer, most_blocks), selector, known(rows))

        rows = _Rows(
            query=query,
            blocks=replace(blocks, turn=None, depth=1),
            mass=self.mass,
            tolerance=self.tolerance,
            selector=self.selector,
        )
        with_place = self.mass is not None
        if always or (on_gpu and self.chooses):

            def both(selector: Selector, inputs: SelectorInputs, fallback: Fallback | None) -> SelectedBlocks:
                selected = selection_of(layer, None, selector, inputs)
                return selected_blocks(layer, with_place, selected, inputs.length, fallback)

            selector = jax.tree.map(lambda number: PerRow(array=number), self.selector)
            return per_head(both, selector, known(rows), fallback)
        if self.chooses:
            selected = run_for(scored & (blocks.length > 0) if on_cpu else scored, select, rows)
        else:
            selected = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(select, rows))

        def settled(
            opened: Array, estimate: Array, upper: Array | None, length: Array, fallback: Fallback | None
        ) -> SelectedBlocks:
            own = Selection(opened=opened, estimate=estimate, upper=upper, shares=selected.shares)
            return selected_blocks(layer, with_place, own, length, fallback)

        upper = None if selected.upper is None else PerQuery(array=selected.upper)
        return per_head(
            settled,
            PerHead(array=selected.opened),
            PerQuery(array=selected.estimate),
            upper,
            PerRow(array=blocks.length),
            fallback,
        )


def long_rows(
    chooses: bool, min_context: Int[Array, " r"] | None, lengths: Int[Array, " r"], window: int | None = None
) -> Bool[Array, " r"]:
    """Return whether a layer selects blocks for rows: not for those below `min_context`.

    A layer with a window selects none for rows of more than `WINDOWS_SCORED` windows. Scores cover all blocks of a row,
    but full attention reads those in the window alone.
    """
    if not chooses:
        return jnp.zeros_like(lengths, bool)
    long = jnp.ones_like(lengths, bool) if min_context is None else lengths >= min_context
    return long if window is None else long & (lengths <= WINDOWS_SCORED * window)


def _kind(plant: Plant, softmax: Softmax) -> LayerKind:
    return LayerKind(page_size=plant.page_size, window=softmax.window, soft_cap=softmax.soft_cap)


def _grouped(queries: Float[Array, "r c d"], plant: Plant, softmax: Softmax) -> Float[Array, "r k g d"]:
    """Return queries by KV head, float32, scaled so that query . key is the score."""
    r, _, d = queries.shape
    by_head = queries.reshape(r, plant.model.num_kv_heads, -1, d)[:, :, : plant.model.group_size]
    return by_head.astype(jnp.float32) * softmax.scale

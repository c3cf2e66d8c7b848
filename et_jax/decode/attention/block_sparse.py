"""Attention to the blocks of one layer that its selector chooses."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

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
from et_jax.decode.once import run_if
from et_jax.decode.plant import Plant
from et_jax.pallas.backend import platform
from et_jax.pallas.per_head import PerHead, PerQuery, PerRow, per_head
from et_jax.softmax import Softmax
from et_jax.types import pytree, replace, static

G = TypeVar("G")
T = TypeVar("T")

WINDOWS_SCORED = 2  # windows; a layer with a window scores no blocks of longer rows


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
        read = self._if_any_selects(lambda given: masses(*given), (selected, blocks, by_list))
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

    def _if_any_selects(self, run: Callable[[G], T], given: G) -> T:
        """Return `run(given)`, or zeros if no row selects at this token; a GPU always runs it."""
        if self.refresh is None or platform() == "gpu":
            return run(given)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, given))
        return run_if(jnp.any(self.refresh), lambda _, given: run(given), zeros, given)

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
        and the one being written. If no row is scored, a CPU and a TPU skip the scores. A GPU would synchronise with
        the host for that: it scores rows of no tokens. So does a CPU for rows beside those that are scored.
        """
        layer = _kind(plant, softmax)
        always = self.chooses and self.refresh is None and self.min_context is None and softmax.window is None
        on_gpu = platform() == "gpu"
        fallback = None
        if not always:
            long = long_rows(self.chooses, self.min_context, blocks.length, softmax.window)
            fallback = Fallback(
                long=PerRow(array=long.astype(jnp.int32)),
                refresh=None if self.refresh is None else PerRow(array=self.refresh.astype(jnp.int32)),
                last=None if self.refresh is None else PerHead(array=self.last),
            )

        def known(given: tuple) -> SelectorInputs:
            query, blocks, mass = given
            length = blocks.length
            if mass is not None:
                beyond = blocks.table.shape[1] - mass.shape[-1]  # of a widened table
                mass = jnp.pad(mass, ((0, 0), (0, 0), (0, beyond)), constant_values=1.0).reshape(*query.shape[:3], -1)
            if not always and platform() != "tpu":
                blocks = replace(blocks, length=jnp.where(scored, length, 0))
            stored = selector_inputs(query, cached, surprisal, blocks, self.tolerance, plant.scores_backend, layer)
            return replace(
                stored,
                length=PerRow(array=length),
                last_mass=None if mass is None else PerQuery(array=mass),
                sensitivity=self.sensitivity,
            )

        given, with_place = (query, blocks, self.mass), self.mass is not None
        length, selector = PerRow(array=blocks.length), jax.tree.map(lambda number: PerRow(array=number), self.selector)
        most_blocks = blocks.most_blocks if platform() == "cpu" else None

        def select(given: tuple) -> Selection:
            return per_head(partial(selection_of, layer, most_blocks), selector, known(given))

        shapes = jax.eval_shape(select, given)
        if always or (on_gpu and self.chooses):

            def both(selector: Selector, inputs: SelectorInputs, fallback: Fallback | None) -> SelectedBlocks:
                selected = selection_of(layer, most_blocks, selector, inputs)
                return selected_blocks(layer, with_place, selected, inputs.length, fallback)

            return per_head(both, selector, known(given), fallback)
        selected = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        if self.chooses:
            selected = run_if(jnp.any(scored), lambda _, given: select(given), selected, given)

        def settled(
            opened: Array, estimate: Array, upper: Array | None, length: Array, fallback: Fallback | None
        ) -> SelectedBlocks:
            own = Selection(opened=opened, estimate=estimate, upper=upper, shares=selected.shares)
            return selected_blocks(layer, with_place, own, length, fallback)

        upper = None if selected.upper is None else PerQuery(array=selected.upper)
        return per_head(
            settled, PerHead(array=selected.opened), PerQuery(array=selected.estimate), upper, length, fallback
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

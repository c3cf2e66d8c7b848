"""How a chunk reads the cache: whole, or row by row what selectors choose.

This is where the cache, the selectors and the kernels meet.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import pack_blocks, unpack_blocks
from et_jax.control.select import Selection, Selector
from et_jax.control.view import attention_entropy
from et_jax.decode.cache import KVCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.decode.reading import read_all, read_chosen
from et_jax.decode.selection import (
    Blocks,
    blocks_of,
    held_blocks,
    in_units_read,
    least_share_read,
    select,
    shares_after,
    with_residual,
)
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.sums import total
from et_jax.types import Table, pytree, replace, static


@pytree
class ReadStats:
    """What attention read, gathered over the layers run so far.

    `blocks_read` counts blocks over layers and KV heads, `summaries_read` likewise where a selector
    looked; `kept_mass` is the least share of attention mass on the blocks read, over layers and heads;
    `entropies` sums each query head's attention entropy over the layers whose blocks were chosen by this
    token, `num_entropies` counts those heads and `least_entropy` is the least (inf where there are none).
    `block_masks` holds each layer's packed mask, `block_masses` the share of mass of every query head and block, where
    selectors go by it (None elsewhere).
    """

    blocks_read: Int[Array, " b"]
    summaries_read: Int[Array, " b"]
    kept_mass: Float[Array, " b"]
    entropies: Float[Array, " b"]
    num_entropies: Float[Array, " b"]
    least_entropy: Float[Array, " b"]
    block_masks: tuple[UInt32[Array, "b k n32"], ...]
    block_masses: tuple[Float[Array, "b h n"] | None, ...] = ()

    @property
    def reads(self) -> Int[Array, "b l k"]:
        """The blocks that each layer and KV head read."""
        words = jax.lax.population_count(jnp.stack(self.block_masks, axis=1))
        return jnp.sum(words.astype(jnp.int32), axis=-1, dtype=jnp.int32)


@pytree
class Whole:
    """Reads everything, of chunks of any length, and notes nothing."""

    def begun(self, num_rows: int) -> None:
        """Return no notes."""

    def together(self, plant: Plant, layer: int) -> bool:
        """Return that rows are read one by one."""
        return False

    def read(
        self, plant: Plant, layer: int, q: Float[Array, "r t h d"], cache: KVCache, chunk: Chunk, notes: None
    ) -> tuple[Float[Array, "r t h d"], None]:
        """Return attention to all there is."""
        cached = cache.layers[layer]
        if q.shape[1] == 1:
            return read_all(plant, layer, q[:, 0], cached, chunk.table, chunk.lengths, None)[:, None], notes
        softmax, backend = plant.softmax(layer), plant.backend
        out, _ = paged_prefill(q, cached.pages, chunk.table, chunk.start, softmax=softmax, backend=backend)
        return out, notes


@pytree
class Selected:
    """Reads of each row, of one token, the blocks that its layer's selector chooses, and notes what that was.

    Blocks are chosen anew every `refresh_every` tokens: where a row is not `fresh`, the blocks of `block_mask`, those
    last read, are read again; `kept_mass` is what was kept then. `selectors` are those of every layer, their numbers
    with a row each. `skipped` counts the blocks at the beginning that a KV head holds nothing of, None where each holds
    all. `block_mass` is what share each query head had on each block when that was last read; None where no selector
    goes by it. `residual` lets unread blocks count as their mean. `sensitivity` is that of the model's heads, where it
    has been measured.
    """

    tolerance: Float[Array, " r"]
    fresh: Bool[Array, " r"]
    block_mask: UInt32[Array, "r l k n32"]
    kept_mass: Float[Array, " r"]
    selectors: tuple[Selector, ...]
    skipped: Int[Array, "r l k"] | None = None
    block_mass: Float[Array, "r l h n"] | None = None
    refresh_every: int = static(default=1)
    residual: bool = static(default=False)
    sensitivity: Table | None = static(default=None)

    def begun(self, num_rows: int) -> ReadStats:
        """Return stats of nothing read."""
        return no_reads(num_rows)

    def together(self, plant: Plant, layer: int) -> bool:
        """Return whether the kernel reads a page once for all rows of a slot."""
        return plant.reads_together(layer, not self.selectors[layer].reads_all)

    def read(
        self, plant: Plant, layer: int, q: Float[Array, "r 1 h d"], cache: KVCache, chunk: Chunk, notes: ReadStats
    ) -> tuple[Float[Array, "r 1 h d"], ReadStats]:
        """Return attention to the blocks chosen."""
        blocks = blocks_of(chunk.table, chunk.lengths, plant.page_size, plant.model.windows[layer])
        read = self._read_all if self.selectors[layer].reads_all else self._read_chosen
        out, notes = read(plant, layer, q[:, 0], cache, chunk, blocks, notes)
        return out[:, None], notes

    def _read_all(
        self,
        plant: Plant,
        layer: int,
        queries: Float[Array, "r h d"],
        cache: KVCache,
        chunk: Chunk,
        blocks: Blocks,
        notes: ReadStats,
    ) -> tuple[Float[Array, "r h d"], ReadStats]:
        table, skipped = chunk.table, None if self.skipped is None else self.skipped[:, layer]
        out = read_all(plant, layer, queries, cache.layers[layer], table, chunk.lengths, chunk.at, skipped)
        heads = len(table), plant.model.num_kv_heads, table.shape[1]
        opened = jnp.broadcast_to(blocks.readable[:, None], heads)
        if skipped is not None:
            opened &= jnp.arange(table.shape[1]) >= skipped[..., None]
        return out, _note(notes, opened, self._mass(layer))

    def _read_chosen(
        self,
        plant: Plant,
        layer: int,
        queries: Float[Array, "r h d"],
        cache: KVCache,
        chunk: Chunk,
        blocks: Blocks,
        notes: ReadStats,
    ) -> tuple[Float[Array, "r h d"], ReadStats]:
        cached, lengths, mass = cache.layers[layer], chunk.lengths, self._mass(layer)
        grouped = _grouped(queries, plant, layer)
        chosen = self._choose(plant, layer, grouped, cache, blocks)
        out, log_read, block_lse = read_chosen(
            plant, layer, queries, cached, chunk.table, chosen.opened, lengths, chunk.at
        )
        log_read = log_read.reshape(grouped.shape[:3])
        if chosen.shares:
            chosen = in_units_read(chosen, blocks, log_read)
        if mass is not None:
            known = shares_after(chosen, blocks, block_lse.reshape(*grouped.shape[:3], -1)).reshape(mass.shape)
            mass = known if self.refresh_every == 1 else jnp.where(self.fresh[:, None, None], known, mass)
        if self.residual:
            assert cached.summary is not None  # `select` has looked at it
            d = plant.model.head_dim
            values = cached.summary.mean[:, chunk.table].swapaxes(0, 1)[..., d : 2 * d]
            whole = with_residual(out.astype(jnp.float32).reshape(grouped.shape), chosen, blocks, log_read, values)
            out = whole.astype(out.dtype).reshape(out.shape)
        notes = _note(notes, chosen.opened, mass)
        kept = jnp.where(self.fresh, least_share_read(chosen, blocks, log_read), self.kept_mass)
        looked = jnp.where(self.fresh, held_blocks(lengths, plant.page_size), 0) * plant.model.num_kv_heads
        entropy = attention_entropy(chosen.estimate, (blocks.num_tokens > 0)[:, None, None])
        return out, replace(
            notes,
            kept_mass=jnp.minimum(notes.kept_mass, kept),
            summaries_read=notes.summaries_read + looked,
            entropies=notes.entropies + jnp.where(self.fresh, total(entropy.reshape(entropy.shape[0], -1)), 0.0),
            num_entropies=notes.num_entropies + jnp.where(self.fresh, float(plant.model.num_heads), 0.0),
            least_entropy=jnp.where(
                self.fresh, jnp.minimum(notes.least_entropy, jnp.min(entropy, axis=(1, 2))), notes.least_entropy
            ),
        )

    def _mass(self, layer: int) -> Float[Array, "r h n"] | None:
        return None if self.block_mass is None else self.block_mass[:, layer]

    def _choose(
        self, plant: Plant, layer: int, query: Float[Array, "r k g d"], cache: KVCache, blocks: Blocks
    ) -> Selection:
        """The layer's selection; where a row is not `fresh`, the blocks it read last and the one being written."""

        def choose() -> Selection:
            selector, backend, mass = self.selectors[layer], plant.scores_backend, self._mass(layer)
            return select(selector, query, cache, layer, blocks, self.tolerance, backend, self.sensitivity, mass)

        if self.refresh_every == 1:
            return choose()
        shapes = jax.eval_shape(choose)
        if shapes.upper is not None:
            raise ValueError("refresh_every: a certified selector proves something of this token's query alone; use 1")
        chosen = jax.lax.cond(
            jnp.any(self.fresh),
            choose,
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        )
        last = unpack_blocks(self.block_mask[:, layer])[..., : blocks.readable.shape[1]]
        again = (last & blocks.readable[:, None]) | blocks.certain[:, None]
        return replace(chosen, opened=jnp.where(self.fresh[:, None, None], chosen.opened, again))


def no_reads(batch: int) -> ReadStats:
    """Return stats of nothing read."""
    zeros, ones = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.float32)
    return ReadStats(
        blocks_read=zeros,
        summaries_read=zeros,
        kept_mass=ones,
        entropies=0.0 * ones,
        num_entropies=0.0 * ones,
        least_entropy=jnp.inf * ones,
        block_masks=(),
    )


def _note(notes: ReadStats, opened: Bool[Array, "r k n"], mass: Float[Array, "r h n"] | None) -> ReadStats:
    """The stats with the blocks of one more layer."""
    return replace(
        notes,
        blocks_read=notes.blocks_read + jnp.sum(opened, axis=(1, 2), dtype=jnp.int32),
        block_masks=(*notes.block_masks, pack_blocks(opened)),
        block_masses=(*notes.block_masses, mass),
    )


def _grouped(queries: Float[Array, "r h d"], plant: Plant, layer: int) -> Float[Array, "r k g d"]:
    """Queries by KV head, float32, scaled so that query . key is the score."""
    r, _, d = queries.shape
    return queries.astype(jnp.float32).reshape(r, plant.model.num_kv_heads, -1, d) * plant.softmax(layer).scale

"""Records of the blocks that attention read: of one layer, and gathered over all."""

from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import pack_blocks
from et_jax.decode.attention.blocks import blocks_of
from et_jax.decode.chunk import Chunk
from et_jax.decode.mixing import ExpertReads
from et_jax.decode.plant import Plant
from et_jax.models.stacks import Turns, entry
from et_jax.sums import total
from et_jax.types import pytree, replace, static


@pytree
class ReadStats:
    """The blocks that attention read, gathered over layers.

    `blocks_read` counts blocks over layers and KV heads, `summaries_read` likewise those that a selector
    scored; `kept_mass` is the least share of attention mass on the blocks read, over layers and heads, or NaN;
    `entropies` sums each query head's attention entropy over the layers whose blocks were selected at this
    token, `num_entropies` counts those heads and `least_entropy` is the least (inf if there are none).
    `block_masks` has each layer's packed mask, `block_masses` the share of mass of every query head and block, if
    selectors use it (else None). `heavy_blocks` has the blocks with most of the mass, packed, of all layers and of one
    row a slot, for a self-drafting model, none for rows that are not asked for (`pruned`). `experts` are those
    of the rows, None for a model without experts.
    """

    blocks_read: Int[Array, " b"]
    summaries_read: Int[Array, " b"]
    kept_mass: Float[Array, " b"]
    entropies: Float[Array, " b"]
    num_entropies: Float[Array, " b"]
    least_entropy: Float[Array, " b"]
    block_masks: UInt32[Array, "b l k n32"]
    block_masses: Float[Array, "b l h n"] | None = None
    heavy_blocks: UInt32[Array, "s l k n32"] | None = None
    experts: ExpertReads | None = None

    @property
    def reads(self) -> Int[Array, "b l k"]:
        """The number of blocks that each layer and KV head read."""
        words = jax.lax.population_count(self.block_masks)
        return jnp.sum(words.astype(jnp.int32), axis=-1, dtype=jnp.int32)


def no_reads(batch: int) -> ReadStats:
    """Return empty stats, of no layers."""
    zeros, ones = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.float32)
    return ReadStats(
        blocks_read=zeros,
        summaries_read=zeros,
        kept_mass=ones,
        entropies=0.0 * ones,
        num_entropies=0.0 * ones,
        least_entropy=jnp.inf * ones,
        block_masks=jnp.zeros((batch, 0, 0, 0), jnp.uint32),
    )


@pytree
class LayerReads:
    """The record of one layer: fields as in `ReadStats`; without a selector there is no `by_head`.

    The number of blocks follows from the mask. `block_lse` is the log-sum-exp of each block, in nats, of the rows
    whose drafts use it.
    """

    block_mask: UInt32[Array, "b k n32"]
    block_mass: Float[Array, "b h n"] | None
    by_head: "ByHead | None" = None
    block_lse: Float[Array, "s h n"] | None = None


@pytree
class AllRead:
    """The record of a layer that read everything within the `window`.

    The blocks follow from the lengths: `written_out` computes them once for all layers of a window, after all layers.
    """

    window: int | None = static(default=None)


@pytree
class ByHead:
    """The result of a selection for every query head: the share of mass `kept`, and the entropy of attention.

    `scored` are the rows whose blocks the layer scored, None for a layer that scores the rows of the other layers.
    """

    kept: Float[Array, "r *l h"]
    entropy: Float[Array, "r *l h"]
    scored: Bool[Array, "r *l"] | None = None


def selected_reads(
    records: tuple[Any, ...], long: Bool[Array, " r"], scored: Bool[Array, " r"], summaries: Int[Array, " r"]
) -> ReadStats:
    """Return the stats of block selection over the layers that select blocks; without masks and masses.

    Rows that are not `long` read everything. Of a row that is, and is not `scored`, no mass is known. The scored have
    `summaries` scored in each layer, unless the layer records which rows it scored.
    """
    found = [
        jax.tree.map(lambda x: x[:, None], one.by_head)
        if isinstance(record, LayerReads)
        else jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), one.by_head)
        for record in records
        for one in (record.of_period if isinstance(record, Turns) else (record,))
        if isinstance(one, LayerReads) and one.by_head is not None
    ]
    stats = no_reads(len(scored))
    if not found:
        return stats
    kept = jnp.concatenate([one.kept for one in found], axis=1)
    by_layer = [
        jnp.broadcast_to(scored[:, None], one.kept.shape[:2]) if one.scored is None else one.scored for one in found
    ]
    # unstacked layers one after the other, those of a scan together
    sums = (jnp.sum(jnp.where(own, total(one.entropy), 0.0), axis=1) for own, one in zip(by_layer, found, strict=True))
    least = (jnp.where(own, jnp.min(one.entropy, axis=2), jnp.inf) for own, one in zip(by_layer, found, strict=True))
    layers = jnp.sum(jnp.concatenate(by_layer, axis=1), axis=1, dtype=jnp.int32)
    return replace(
        stats,
        kept_mass=jnp.where(scored, jnp.min(kept, axis=(1, 2)), jnp.where(long, jnp.nan, 1.0)),
        summaries_read=layers * summaries,
        entropies=reduce(jnp.add, sums, stats.entropies),
        num_entropies=(layers * kept.shape[2]).astype(jnp.float32),
        least_entropy=jnp.min(jnp.concatenate(list(least), axis=1), axis=1),
    )


def reads_of(
    opened: Bool[Array, "r k n"], mass: Float[Array, "r h n"] | None, block_lse: Float[Array, "s h n"] | None = None
) -> LayerReads:
    """Return the record of a layer without a selector that read these blocks."""
    return LayerReads(block_mask=pack_blocks(opened), block_mass=mass, block_lse=block_lse)


def written_out(
    plant: Plant, chunk: Chunk, skipped: Int[Array, "r l k"] | None, records: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the records of all layers in order, with every `AllRead` replaced by a `LayerReads`.

    `skipped` counts the leading blocks in which a KV head of a layer has no entries.
    """

    @cache
    def within(window: int | None) -> Bool[Array, "r n"]:
        return blocks_of(chunk.table, chunk.lengths, plant.page_size, window).readable

    def of_layer(record: AllRead, number: int | Int[Array, ""]) -> LayerReads:
        readable = within(record.window)[:, None]
        opened = jnp.broadcast_to(readable, (len(readable), plant.model.num_kv_heads, readable.shape[-1]))
        if skipped is not None:
            opened = opened & (jnp.arange(opened.shape[-1]) >= entry(skipped, number, axis=1)[..., None])
        return reads_of(opened, None)

    found: list[Any] = []
    number = 0
    for record in records:
        turns = record if isinstance(record, Turns) else None
        of_period = (record,) if turns is None else turns.of_period
        depth = 1 if turns is None else turns.depth
        outputs = []
        for first, one in enumerate(of_period, number):
            if isinstance(one, AllRead):
                numbers = first + len(of_period) * jnp.arange(depth)
                one = of_layer(one, first) if turns is None else jax.vmap(partial(of_layer, one))(numbers)
            outputs.append(one)
        found.append(outputs[0] if turns is None else replace(turns, of_period=tuple(outputs)))
        number += len(of_period) * depth
    return tuple(found)

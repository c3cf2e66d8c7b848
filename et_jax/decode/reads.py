"""What attention read: of one layer, and gathered over all."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import pack_blocks
from et_jax.decode.mixing import ExpertReads
from et_jax.types import pytree, replace


@pytree
class ReadStats:
    """What attention read, gathered over layers.

    `blocks_read` counts blocks over layers and KV heads, `summaries_read` likewise where a selector
    looked; `kept_mass` is the least share of attention mass on the blocks read, over layers and heads;
    `entropies` sums each query head's attention entropy over the layers whose blocks were chosen by this
    token, `num_entropies` counts those heads and `least_entropy` is the least (inf where there are none).
    `block_masks` holds each layer's packed mask, `block_masses` the share of mass of every query head and block, where
    selectors go by it (None elsewhere). `heavy_blocks` are those that held the mass, packed, of all layers and of one
    row a slot, for a model that drafts for itself, none where it was not asked (`decode.pruned`). `experts` are those
    that the rows took, None where the model has none.
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
        """The blocks that each layer and KV head read."""
        words = jax.lax.population_count(self.block_masks)
        return jnp.sum(words.astype(jnp.int32), axis=-1, dtype=jnp.int32)


def no_reads(batch: int) -> ReadStats:
    """Return stats of nothing read, of no layers."""
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
    """What attention read of one layer: fields as those of `ReadStats`; a layer that chose nothing has no `looked`.

    `block_lse` is the log-sum-exp of each block, in nats, of the rows whose drafts go by it.
    """

    blocks_read: Int[Array, " b"]
    block_mask: UInt32[Array, "b k n32"]
    block_mass: Float[Array, "b h n"] | None
    looked: "Looked | None" = None
    block_lse: Float[Array, "s h n"] | None = None

    def added_to(self, stats: ReadStats) -> ReadStats:
        """Return the stats with what was read of this layer added up; masks and masses are as they were."""
        stats = replace(stats, blocks_read=stats.blocks_read + self.blocks_read)
        if self.looked is None:
            return stats
        return replace(
            stats,
            kept_mass=jnp.minimum(stats.kept_mass, self.looked.kept_mass),
            summaries_read=stats.summaries_read + self.looked.summaries_read,
            entropies=stats.entropies + self.looked.entropies,
            num_entropies=stats.num_entropies + self.looked.num_entropies,
            least_entropy=jnp.minimum(stats.least_entropy, self.looked.least_entropy),
        )


@pytree
class Looked:
    """What choosing the blocks of one layer came to: fields as those of `ReadStats`."""

    summaries_read: Int[Array, " b"]
    kept_mass: Float[Array, " b"]
    entropies: Float[Array, " b"]
    num_entropies: Float[Array, " b"]
    least_entropy: Float[Array, " b"]


def reads_of(
    opened: Bool[Array, "r k n"],
    mass: Float[Array, "r h n"] | None,
    looked: Looked | None,
    block_lse: Float[Array, "s h n"] | None = None,
) -> LayerReads:
    """Return the notes of a layer of which these blocks were read."""
    return LayerReads(
        blocks_read=jnp.sum(opened, axis=(1, 2), dtype=jnp.int32),
        block_mask=pack_blocks(opened),
        block_mass=mass,
        looked=looked,
        block_lse=block_lse,
    )

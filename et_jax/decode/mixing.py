"""Routing of a chunk to a layer's experts, as trained or by a rule, and which experts that used."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from et_jax.control.experts import ExpertRule
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.experts import Choice, Experts, choose, gate, mixed, summed
from et_jax.models.sharding import AXIS, expert_specs
from et_jax.types import pytree, replace


@pytree
class ExpertReads:
    """The experts that a chunk used, counted over layers.

    `touched` counts the experts whose weights were read, once each, shared by all rows: equal for each of them.
    `chosen` counts those that the tokens of each row were routed to.
    """

    touched: Int[Array, "*b"]
    chosen: Int[Array, "*b"]


@pytree
class RowRules:
    """A rule for the experts of every row, with the entropy of its last prediction, in nats, infinite if none."""

    rule: ExpertRule
    entropy: Float[Array, " r"]


def no_experts(plant: Plant, num_rows: int) -> ExpertReads | None:
    """Return the reads of rows without experts; None for a model that has none."""
    if plant.model.experts is None:
        return None
    none = jnp.zeros(num_rows, jnp.int32)
    return ExpertReads(touched=none, chosen=none)


@partial(jax.jit, static_argnums=0)
def mix(
    plant: Plant, experts: Experts, x: Float[Array, "r t w"], chunk: Chunk, rules: RowRules | None, reads: ExpertReads
) -> tuple[Float[Array, "r t w"], ExpertReads]:
    """Return the output of a layer's experts for a chunk, and the reads with those of this layer.

    Padding is routed to no expert. With `rules` a row has one token.
    """
    config = plant.model.experts
    if config is None:
        raise ValueError("plant: got a model without experts, wanted one that mixes them")
    (num_rows, length, _), flat = x.shape, x.reshape(-1, x.shape[-1])
    real = (jnp.arange(length) < chunk.count[:, None]).reshape(-1)

    def count(probability: Float[Array, "n c"]) -> Int[Array, " n"]:
        most = jnp.full(real.shape, config.num_per_token)
        if rules is not None:
            asked = jax.vmap(lambda rule, *seen: rule(*seen))(rules.rule, probability, rules.entropy)
            most = jnp.clip(asked, 1, config.num_per_token)
        return jnp.where(real, most, 0)

    choice = choose(config, gate(experts, flat), count)
    if plant.mesh is None:
        out = mixed(experts, flat, choice, "loop", config.activation)
    else:
        out = _mixed_over(plant.mesh, plant.model, experts, flat, choice)
    chosen = jnp.sum((choice.expert < config.num_experts).reshape(num_rows, -1), axis=1, dtype=jnp.int32)
    touched = jnp.sum(choice.touched(config.num_experts), dtype=jnp.int32)
    return out.reshape(x.shape), ExpertReads(touched=reads.touched + touched, chosen=reads.chosen + chosen)


def _mixed_over(
    mesh: Mesh, model: ModelShape, experts: Experts, x: Float[Array, "n w"], choice: Choice
) -> Float[Array, "n w"]:
    """Return the output of experts whose widths are split over a mesh: the sum of every chip's part."""
    assert isinstance(model, ModelConfig) and model.experts is not None
    activation = model.experts.activation

    def here(experts: Experts, turn: Array | None, x: Array, choice: Choice) -> Array:
        down_bias = experts.down_bias
        if down_bias is not None:  # it is not split: only one chip adds it
            down_bias = jnp.where(jax.lax.axis_index(AXIS) == 0, down_bias, jnp.zeros_like(down_bias))
        part = summed(replace(experts, turn=turn, down_bias=down_bias), x, choice, "loop", activation)
        return jax.lax.psum(part, AXIS).astype(x.dtype)

    everywhere, apart = PartitionSpec(), replace(experts, turn=None)
    return jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(expert_specs(apart, model), everywhere, everywhere, everywhere),
        out_specs=everywhere,
        check_vma=False,  # the check cannot see that the loop has equal trip counts on every chip
    )(apart, experts.turn, x, choice)

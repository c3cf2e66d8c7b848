"""How a chunk is mixed by a layer's experts: as trained, or as a rule has it, and which experts that took."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.experts import ExpertRule
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.models.experts import Experts, choose, gate, mixed
from et_jax.types import pytree


@pytree
class ExpertReads:
    """The experts that a chunk took, counted over layers.

    `touched` are those whose weights were read, once each, which the rows share: it is the same for each of them.
    `chosen` are those that the tokens of each row went to.
    """

    touched: Int[Array, "*b"]
    chosen: Int[Array, "*b"]


@pytree
class RowRules:
    """A rule for the experts of every row, with the entropy of its last prediction, in nats, infinite if none."""

    rule: ExpertRule
    entropy: Float[Array, " r"]


def no_experts(plant: Plant, num_rows: int) -> ExpertReads | None:
    """Return that rows took no experts; None for a model that has none."""
    if plant.model.experts is None:
        return None
    none = jnp.zeros(num_rows, jnp.int32)
    return ExpertReads(touched=none, chosen=none)


@partial(jax.jit, static_argnums=0)
def mix(
    plant: Plant, experts: Experts, x: Float[Array, "r t w"], chunk: Chunk, rules: RowRules | None, reads: ExpertReads
) -> tuple[Float[Array, "r t w"], ExpertReads]:
    """Return what a layer's experts make of a chunk, and the reads with those of this layer.

    Padding goes to none. With `rules` a row has one token.
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
    out = mixed(experts, flat, choice, "loop", config.activation)
    chosen = jnp.sum((choice.expert < config.num_experts).reshape(num_rows, -1), axis=1, dtype=jnp.int32)
    touched = jnp.sum(choice.touched(config.num_experts), dtype=jnp.int32)
    return out.reshape(x.shape), ExpertReads(touched=reads.touched + touched, chosen=reads.chosen + chosen)

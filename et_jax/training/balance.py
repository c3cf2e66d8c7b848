"""The experts of a mixture in training: dense products, and the loss that balances the load."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.models.config import ExpertConfig
from et_jax.models.experts import Choice, Experts, choose, gate, mixed


def load_balance(probability: Float[Array, "n e"], choice: Choice) -> Float[Array, ""]:
    """Return e sum_i f_i P_i of `e` experts: 1 for an even load, at most `e`.

    f_i is the share of the routing choices for expert i, P_i its mean probability, which has the only gradient (Fedus
    et al. 2021, equations 4 to 6, for one choice per token).
    """
    num_experts = probability.shape[-1]
    share = jax.nn.one_hot(choice.expert, num_experts).mean(axis=(0, 1))
    return num_experts * jnp.sum(share * probability.mean(axis=0))


def mix(config: ExpertConfig, layer: int, experts: Experts, x: Float[Array, "b t w"], memory: Any) -> tuple[Array, Any]:
    """Return the output of a layer's experts as trained, and `memory`, a sum, plus the layer's load balance."""
    flat = x.reshape(-1, x.shape[-1])
    probability = gate(experts, flat)
    choice = choose(config, probability)
    out = mixed(experts, flat, choice, "every", config.activation)
    return out.reshape(x.shape), memory + load_balance(probability, choice)

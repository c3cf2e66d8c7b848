"""The experts of a mixture in training: every one with every token, and the loss that spreads tokens over them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.models.config import ExpertConfig
from et_jax.models.experts import Choice, Experts, choose, gate, mixed


def load_balance(probability: Float[Array, "n e"], choice: Choice) -> Float[Array, ""]:
    """Return e sum_i f_i P_i of `e` experts: 1 where tokens are spread evenly, at most `e`.

    f_i is the share of the choices that fall on expert i, P_i its mean probability, which alone has a gradient (Fedus
    et al. 2021, equations 4 to 6, where a token has one choice).
    """
    num_experts = probability.shape[-1]
    share = jax.nn.one_hot(choice.expert, num_experts).mean(axis=(0, 1))
    return num_experts * jnp.sum(share * probability.mean(axis=0))


def mix(config: ExpertConfig, layer: int, experts: Experts, x: Float[Array, "b t w"], memory: Any) -> tuple[Array, Any]:
    """Return what a layer's experts make of tokens as trained, and `memory`, a sum, with the layer's load balance."""
    flat = x.reshape(-1, x.shape[-1])
    probability = gate(experts, flat)
    choice = choose(config, probability)
    out = mixed(experts, flat, choice, "every", config.activation)
    return out.reshape(x.shape), memory + load_balance(probability, choice)

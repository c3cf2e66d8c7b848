"""A small mixture of experts with random weights."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from et_jax.models.config import ClampedSwish, ExpertConfig
from et_jax.models.experts import Experts, choose, gate, mixed
from et_jax.models.transformer import initialise
from et_jax.types import replace
from scripts.measuring.shapes import SMALL

WIDTH = 24
CONFIG = ExpertConfig(num_experts=6, num_per_token=3, width=20, normalised=True, layers=(True,), shared_width=16)
BIASED = {"shared_width": None, "biases": True, "activation": ClampedSwish(alpha=1.702, limit=1.5)}
ONE_LAYER = dataclasses.replace(SMALL, hidden_size=WIDTH, num_layers=1, windows=(None,))


def drawn(config: ExpertConfig = CONFIG, dtype=jnp.float32, width: int = WIDTH) -> Experts:
    model = dataclasses.replace(ONE_LAYER, hidden_size=width, experts=config)
    experts = initialise(model, jax.random.key(0), dtype).layers[0].experts
    experts = jax.tree.map(lambda x: x * jnp.asarray(10, dtype), experts)
    if not config.biases:
        return experts
    names = ("router_bias", "gate_bias", "up_bias", "down_bias")  # which begin at 0
    keys = zip(names, jax.random.split(jax.random.key(2), len(names)), strict=True)
    return replace(experts, **{name: jax.random.normal(key, getattr(experts, name).shape, dtype) for name, key in keys})


def tokens(number: int, dtype=jnp.float32, width: int = WIDTH) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (number, width)).astype(dtype)


@partial(jax.jit, static_argnums=(0, 3))
def mix(config: ExpertConfig, experts: Experts, x, form: str):
    return mixed(experts, x, choose(config, gate(experts, x)), form, config.activation)

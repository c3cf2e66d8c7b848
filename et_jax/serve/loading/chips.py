"""How many chips of each common kind a model requires, computed from its configuration."""

from collections.abc import Callable

from jax.sharding import AbstractMesh

from et_jax.decode.config import DecoderConfig
from et_jax.errors import UsageError
from et_jax.models import sharding
from et_jax.models.config import ModelConfig
from et_jax.serve.memory.preflight import Plan, plan, size_text
from et_jax.types import replace

GIGABYTES = {"TPU v5e": 16, "TPU v6e": 32, "H100": 80, "H200": 141}
"""The memory of a chip in GB, from its vendor's data sheet."""


def needed(model: ModelConfig, config: Callable[[ModelConfig], DecoderConfig], fraction: float) -> str:
    """Return a line with the number of chips of each kind that a model requires, and the bytes of weights on each.

    `config` gives the decoder of a model on one device; `fraction` of a chip's memory may be used.
    """
    found = {kind: _least(model, config, int(fraction * size * 1e9)) for kind, size in GIGABYTES.items()}
    said = [
        f"{kind} {'none' if fitting is None else f'{fitting[0]} ({size_text(fitting[1].weights)} of weights each)'}"
        for kind, fitting in found.items()
    ]
    return f"chips that fit it (--tensor-parallel): {', '.join(said)}"


def _least(model: ModelConfig, config: Callable[[ModelConfig], DecoderConfig], memory: int) -> tuple[int, Plan] | None:
    """Return the fewest chips of `memory` bytes that fit a model, with the plan of each; None if it does not fit."""
    every = [sharding.sizes(one) for one in config(model).models if isinstance(one, ModelConfig)]
    for size in sorted(set.intersection(*map(set, every))):
        mesh = None if size == 1 else AbstractMesh((size,), (sharding.AXIS,))
        try:
            found = config(sharding.with_copies(model, size))
            others = tuple(sharding.with_copies(other, size) for other in found.others)
            return size, plan(replace(found, mesh=mesh, others=others), memory)
        except UsageError:
            continue
    return None

"""What the decoder asks of a model, whether it is the transformer of this package or a module of the caller's own."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from et_jax.models import module, params, transformer
from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.module import ModuleModel, ModuleWeights
from et_jax.models.params import Params
from et_jax.models.transformer import AddNorm, Attend, AttendProducts, Mix
from et_jax.models.weights import looked_up, nodes, num_bytes
from et_jax.types import replace

Memory = TypeVar("Memory")

ModelWeights = Params | ModuleWeights
"""The weights of a model: `Params` where a `ModelConfig` describes it, `ModuleWeights` where a `ModuleModel` does."""


def forward(
    weights: ModelWeights,
    model: ModelShape,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    attend: Attend,
    memory: Memory,
    mix: Mix | None = None,
    alike: Sequence[Hashable] | None = None,
    add_norm: AddNorm | None = None,
    attend_products: AttendProducts | None = None,
) -> tuple[Float[Array, "b t v"], Memory]:
    """Return float32 logits at every position and the memory after all layers.

    Experts are mixed as trained unless `mix` does it. The rest is as in `transformer.forward`.

    Under jit, logits the caller ignores are never computed.
    """
    if isinstance(model, ModuleModel):
        assert isinstance(weights, ModuleWeights)
        return module.forward(weights, model, tokens, positions, attend, memory)
    assert isinstance(model, ModelConfig) and isinstance(weights, Params)
    return transformer.forward(weights, model, tokens, positions, attend, memory, mix, alike, add_norm, attend_products)


def num_weights(model: ModelShape) -> int:
    """Return how many numbers a model holds."""
    return model.num_weights if isinstance(model, ModuleModel) else params.num_weights(_built_in(model))


def num_multiplied(model: ModelShape) -> int:
    """Return the weights a token is multiplied with: all, less an embedding that is not the head too."""
    return model.num_multiplied if isinstance(model, ModuleModel) else params.num_multiplied(_built_in(model))


def weight_bytes(model: ModelShape, dtype: DTypeLike, quantize: str | None = None) -> int:
    """Return the bytes of a model's weights in `dtype`, with `quantize` its matrices in that form.

    A module has those that it has.
    """
    if isinstance(model, ModuleModel):
        return model.weight_bytes
    return params.weight_bytes(_built_in(model), dtype, quantize)


def expert_counts(model: ModelShape) -> tuple[int, int]:
    """Return how many experts a model has over all layers, and how many of them a token goes to as trained."""
    if model.experts is None:
        return 0, 0
    layers = sum(model.experts.layers)
    return layers * model.experts.num_experts, layers * model.experts.num_per_token


def expert_weights(model: ModelShape) -> int:
    """Return the numbers of one expert of one layer; 0 where there are none."""
    return 0 if model.experts is None else params.expert_weights(_built_in(model))


def expert_bytes(weights: ModelWeights) -> int:
    """Return the bytes of one expert of one layer; 0 where there are none."""
    mixtures = [] if isinstance(weights, ModuleWeights) else [one.experts for one in weights.layers if one.experts]
    if not mixtures:
        return 0
    one = mixtures[0]
    held = one.gate, one.up, one.down, one.gate_bias, one.up_bias, one.down_bias
    return num_bytes(held) // math.prod(one.gate.shape[:-2])


def token_numbers(model: ModelShape) -> int:
    """Return about how many numbers of a token are alive at once between its layers' attention, an upper estimate.

    Three rows of the feed-forward, or of each expert that a token goes to, beside two of the residual stream; and six
    of this; of a module, nine of the widest there is.
    """
    if isinstance(model, ModuleModel):
        return 9 * model.widest
    c, experts = _built_in(model), model.experts
    mixed = 0 if experts is None else experts.num_per_token * (3 * experts.width + 2 * c.hidden_size)
    return max(3 * c.intermediate_size, mixed) + 6 * c.hidden_size


def device_of(weights: ModelWeights | tuple[ModelWeights, ...]) -> Any:
    """Return the device that weights, of one model or more, are on. Raises ValueError where they are on several."""
    [device] = {device for leaf in jax.tree.leaves(weights) for device in leaf.devices()}
    return device


def put(weights: tuple[ModelWeights, ...], device: Any) -> tuple[ModelWeights, ...]:
    """Return the weights of models on a device, or by a tree of shardings, in the layout in which they are read."""
    there = jax.device_put(weights, device)
    return tuple(replace(one, embedding=looked_up(one.embedding)) if isinstance(one, Params) else one for one in there)


def put_like(weights: tuple[ModelWeights, ...], like: tuple[ModelWeights, ...]) -> tuple[ModelWeights, ...]:
    """Return weights where those of `like` are, each array laid out as it is there."""
    return put(weights, jax.tree.map(lambda x: x.sharding, like))


def dtype_of(weights: ModelWeights) -> np.dtype:
    """Return the dtype that most numbers of a model have."""
    sizes = Counter()
    for node in nodes(weights):
        sizes[node.dtype] += math.prod(node.shape)
    return max(sizes, key=lambda dtype: sizes[dtype])


def _built_in(model: ModelShape) -> ModelConfig:
    if not isinstance(model, ModelConfig):
        raise TypeError(f"model: got {type(model).__name__}, wanted a ModelConfig or a ModuleModel")
    return model

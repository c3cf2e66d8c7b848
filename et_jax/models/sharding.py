"""One model over the chips of a mesh: along which of its axes every weight is split, and the model as a chip sees it.

A chip has some KV heads, the query heads that read them, its part of the width of every feed-forward and of every
expert, and its part of the vocabulary; weights without these axes are replicated. A layer therefore ends in two sums
over the chips, after attention and after the feed-forward (Shoeybi et al. 2019, Megatron-LM, section 3). Every chip
reads its part of a selected expert, whichever the router selects, so no chip waits for another.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.experts import Experts
from et_jax.models.params import Params, describe, in_stacks, is_stacked

S = TypeVar("S", bound=ModelShape)

AXIS = "tp"
"""The only axis of the mesh."""

SPLIT = frozenset({"vocab", "heads", "kv_heads", "each_head", "ffn", "expert_ffn", "shared_ffn"})
"""The axes of weights that are split, by their names in a `WeightSpec`."""


def check(model: ModelShape, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError unless a model can be split over a mesh."""
    if not isinstance(model, ModelConfig):
        raise ValueError(f"mesh: got one for a {type(model).__name__}, wanted a ModelConfig, whose weights have axes")
    if mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh: got axes {mesh.axis_names}, wanted ({AXIS!r},)")
    sizes = {"num_kv_heads": model.num_kv_heads}
    for spec in jax.tree.leaves(describe(model)):
        sizes |= {axis: size for axis, size in zip(spec.axes, spec.shape, strict=True) if axis in SPLIT}
    for axis, size in sizes.items():
        if size % mesh.size:
            raise ValueError(f"mesh: got {mesh.size} chips, wanted a number of them that divides {axis} = {size}")


def of_chip(model: S, mesh: Mesh | AbstractMesh) -> S:
    """Return a model with the heads of one chip, as its attention sees it there."""
    heads, kv_heads = model.num_heads // mesh.size, model.num_kv_heads // mesh.size
    return dataclasses.replace(model, num_heads=heads, num_kv_heads=kv_heads)


def weight_specs(weights: Params, model: ModelConfig) -> Params:
    """Return how each weight of a model is split, as a tree of `PartitionSpec`."""
    described = describe(model)
    if is_stacked(weights, model):
        described = in_stacks(described, model, lambda *alike: alike[0])
    return _specs(described, weights)


def expert_specs(experts: Experts, model: ModelConfig) -> Experts:
    """Return how the experts of a layer are split, likewise; for a stack, given without their `turn`."""
    return _specs(next(layer.experts for layer in describe(model).layers if layer.experts is not None), experts)


def placed(weights: Params, model: ModelConfig, mesh: Mesh) -> Params:
    """Return weights split over the chips of a mesh."""
    return jax.device_put(weights, shardings(mesh, weight_specs(weights, model)))


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Return a tree of shardings over a mesh from a tree of `PartitionSpec`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _specs(described: Any, arrays: Any) -> Any:
    """Return how the described arrays are split; those of a stack lead with an axis of layers."""
    return jax.tree.map(lambda spec, x: _spec(spec.axes, len(x.shape)), described, arrays)


def _spec(axes: Sequence[str], ndim: int) -> PartitionSpec:
    names = [AXIS if axis in SPLIT else None for axis in axes]
    return PartitionSpec(*[None] * (ndim - len(names)), *names)

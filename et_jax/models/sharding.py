"""Tensor parallelism: the axis along which each weight is split over a mesh, and the model as each chip sees it.

A chip has some KV heads, the query heads that attend to them, its part of the width of every feed-forward and expert,
and its part of the vocabulary. Weights without these axes are replicated. A layer therefore has two sums over the
chips, after attention and after the feed-forward (Shoeybi et al. 2019, Megatron-LM, section 3). Every chip reads its
part of each selected expert, so no chip waits for another.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.experts import Experts
from et_jax.models.params import Params, abstract, describe, in_stacks, is_stacked
from et_jax.models.weights import Int8, is_weight

S = TypeVar("S", bound=ModelShape)
T = TypeVar("T")

AXIS = "tp"
"""The only axis of the mesh."""

SPLIT = frozenset({"vocab", "heads", "kv_heads", "each_head", "ffn", "expert_ffn", "shared_ffn"})
"""The axes of weights that are split, by their names in a `WeightSpec`."""


def mesh_of(size: int, number: int = 0) -> Mesh:
    """Return the mesh of group `number` of `size` devices of this process.

    Numbers past the last group wrap around to the first.
    """
    devices = jax.local_devices()
    first = number % (len(devices) // size) * size
    return Mesh(np.array(devices[first : first + size]), (AXIS,))


def check(model: ModelShape, mesh: Mesh | AbstractMesh) -> None:
    """Raise ValueError unless a model can be split over a mesh."""
    if not isinstance(model, ModelConfig):
        raise ValueError(f"mesh: got one for a {type(model).__name__}, wanted a ModelConfig, whose weights have axes")
    if mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh: got axes {mesh.axis_names}, wanted ({AXIS!r},)")
    for axis, size in _split_axes(model).items():
        if size % mesh.size:
            raise ValueError(f"mesh: got {mesh.size} chips, wanted a number of them that divides {axis} = {size}")


def sizes(model: ModelConfig) -> list[int]:
    """Return the numbers of chips over which a model can be split, in ascending order; KV heads may be repeated."""
    common = math.gcd(*(size for axis, size in _split_axes(model).items() if axis not in ("num_kv_heads", "kv_heads")))
    divisors = [size for size in range(1, common + 1) if common % size == 0]
    return [size for size in divisors if with_copies(model, size).num_kv_heads % size == 0]


def with_copies(model: S, size: int) -> S:
    """Return a model with at least one KV head for each of `size` chips, repeating each head if there are fewer.

    A query head of such a model attends to a copy of its KV head in `model`.
    """
    few = model.num_kv_heads < size and size % model.num_kv_heads == 0 and model.num_heads % size == 0
    return dataclasses.replace(model, num_kv_heads=size) if few else model


def copied(node: Any, described: Any, model: ModelConfig, size: int) -> Any:
    """Return a weight, or another array, of `model` with the KV heads repeated as in `with_copies`.

    `described` is its node of `params.describe`.
    """
    copies = with_copies(model, size).num_kv_heads // model.num_kv_heads
    axes = (described.array if is_weight(described) else described).axes
    if copies == 1 or "kv_heads" not in axes:
        return node
    axis = axes.index("kv_heads")

    def repeated(x: Any) -> np.ndarray:
        heads = np.asarray(x).reshape(*x.shape[:axis], -1, model.head_dim, *x.shape[axis + 1 :])
        return np.repeat(heads, copies, axis).reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return jax.tree.map(repeated, node)


def _split_axes(model: ModelConfig) -> dict[str, int]:
    """Return the sizes of a model's split axes, by name."""
    found = {"num_kv_heads": model.num_kv_heads}
    for spec in jax.tree.leaves(describe(model)):
        found |= {axis: size for axis, size in zip(spec.axes, spec.shape, strict=True) if axis in SPLIT}
    return found


def of_chip(model: S, mesh: Mesh | AbstractMesh) -> S:
    """Return the model with the number of heads of a single chip, for its attention."""
    heads, kv_heads = model.num_heads // mesh.size, model.num_kv_heads // mesh.size
    return dataclasses.replace(model, num_heads=heads, num_kv_heads=kv_heads)


def weight_specs(weights: Params, model: ModelConfig) -> Params:
    """Return how each weight of a model is split, as a tree of `PartitionSpec`."""
    described = describe(model)
    if is_stacked(weights, model):
        described = in_stacks(described, model, lambda *alike: alike[0])
    return _specs(described, weights)


def expert_specs(experts: Experts, model: ModelConfig) -> Experts:
    """Return the same for the experts of a layer; those of a stack are given without their `turn`."""
    return _specs(next(layer.experts for layer in describe(model).layers if layer.experts is not None), experts)


def placed(weights: Params, model: ModelConfig, mesh: Mesh) -> Params:
    """Return weights split over the chips of a mesh."""
    return jax.device_put(weights, shardings(mesh, weight_specs(weights, model)))


def placements(model: ModelConfig, mesh: Mesh, dtype: DTypeLike, quantize: str | None, *, stacked: bool) -> Params:
    """Return the sharding of each array of weights, before they are read, as a tree of `NamedSharding`."""
    return shardings(mesh, weight_specs(abstract(model, dtype, quantize, stacked=stacked), model))


def of_layer(place: NamedSharding) -> NamedSharding:
    """Return the sharding of a layer, given that of its stack."""
    return NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))


def bytes_of_chip(model: ModelConfig, mesh: Mesh | AbstractMesh, dtype: DTypeLike, quantize: str | None) -> int:
    """Return the bytes of a model's weights on each chip of a mesh."""
    weights = abstract(model, dtype, quantize)
    return sum(jax.tree.leaves(jax.tree.map(partial(local_bytes, mesh), weights, weight_specs(weights, model))))


def local_bytes(mesh: Mesh | AbstractMesh, x: Any, spec: PartitionSpec) -> int:
    """Return the bytes per chip of an array, or a `ShapeDtypeStruct`, split over a mesh by `spec`."""
    size = math.prod(x.shape) * x.dtype.itemsize
    return size // mesh.size if AXIS in spec else size


def over(weights: T, mesh: Mesh) -> T:
    """Return the shardings of sharded arrays on another mesh of as many chips, with the same split."""
    return jax.tree.map(lambda x: NamedSharding(mesh, x.sharding.spec), weights)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """Return a tree of shardings over a mesh from a tree of `PartitionSpec`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _specs(described: Any, weights: Any) -> Any:
    """Return how the described arrays are split; those of a stack have a leading layer axis."""

    def of_node(node: Any, given: Any) -> Any:
        if isinstance(given, Int8):
            axes, ndim = node.array.axes, len(given.shape)
            return jax.tree.structure(given).unflatten([_spec(axes, ndim), _spec(axes[:-1], ndim - 1)])
        return jax.tree.map(lambda spec, x: _spec(spec.axes, len(x.shape)), node, given)

    return jax.tree.map(of_node, described, weights, is_leaf=is_weight)


def _spec(axes: Sequence[str], ndim: int) -> PartitionSpec:
    names = [AXIS if axis in SPLIT else None for axis in axes]
    return PartitionSpec(*[None] * (ndim - len(names)), *names)

"""Casts or quantises weights while they are read, and puts them on a device or mesh, by layer or in stacks."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from et_jax.models import sharding
from et_jax.models.config import ModelConfig
from et_jax.models.encodings import WEIGHT, Scaled
from et_jax.models.params import Params, describe, in_stacks
from et_jax.models.sources import Piece, Source
from et_jax.models.stored import Encoded, Tensors, read_full, stored_as
from et_jax.models.weights import Dense, Int8, is_weight, looked_up, to_int8
from et_jax.types import replace


def cast(described: Any, array: Float[np.ndarray, "..."], dtype: DTypeLike, quantize: str | None) -> Any:
    """Return a float32 array as the leaf `described`, in `dtype` or quantised."""
    if not is_weight(described):
        return array.astype(dtype)
    return Dense(array=array.astype(dtype)) if quantize is None else to_int8(array, dtype)


def read_int8(source: Source, tensors: Tensors, read: Callable[[Piece], np.ndarray], dtype: DTypeLike) -> Int8:
    """Return a leaf in 8 bits: unchanged if its tensor is stored in int8 with scales per output, otherwise rounded."""
    stored = [tensors[piece.tensor] for piece in source.pieces]
    first, encoding = stored[0], getattr(stored[0], "encoding", None)
    if isinstance(first, Encoded) and isinstance(encoding, Scaled) and encoding.by_output and source.is_full:
        parts = {name: read_full(part) for name, part in first.parts.items()}
        scale = parts[encoding.scale].astype(np.float32).reshape(-1)
        return Int8(array=parts[WEIGHT], scale=scale, dtype=np.dtype(dtype))
    wide = jnp.bfloat16 if all(stored_as(one) == "BF16" for one in stored) else np.float32
    return to_int8(source.read(read, wide), dtype)


def put_in_place(
    config: ModelConfig, nodes: Params, stacked: bool, mesh: Mesh | None, dtype: DTypeLike, quantize: str | None
) -> tuple[ModelConfig, Params]:
    """Call the functions of `nodes` one at a time; return the weights on the default device or split over a mesh.

    The first value is the model's configuration, which over a mesh has repeated KV heads if there are too few.
    """
    places = None
    if mesh is not None:

        def copied(described: Any, node: Callable[[], Any]) -> Callable[[], Any]:
            return lambda: sharding.copied(node(), described, original, mesh.size)

        original, config = config, sharding.with_copies(config, mesh.size)
        nodes = jax.tree.map(copied, describe(original), nodes, is_leaf=is_weight)
        places = sharding.placements(config, mesh, dtype, quantize, stacked=stacked)

    def put(node: Callable[[], Any] | _Layers, place: Any = None) -> Any:
        if not isinstance(node, _Layers):
            return jax.block_until_ready(jax.device_put(node(), place))
        of_layer = jax.tree.map(sharding.of_layer, place)
        one = put(node.layers[0], of_layer)
        stack = _zeros(one, len(node.layers), place)
        for turn, layer in enumerate(node.layers):
            stack = jax.block_until_ready(_put_at(stack, put(layer, of_layer) if turn else one, turn))
        return stack

    nodes = in_stacks(nodes, config, lambda *layers: _Layers(layers)) if stacked else nodes
    params = jax.tree.map(put, nodes) if places is None else jax.tree.map(put, nodes, places)
    return config, replace(params, embedding=looked_up(params.embedding))


@dataclasses.dataclass(frozen=True)
class _Layers:
    """The functions that return a weight of each layer of a stack."""

    layers: tuple[Callable[[], Any], ...]


def _zeros(one: Any, depth: int, place: Any) -> Any:
    """Return zeros for a stack of `depth` arrays like `one`, at `place` or on the default device."""
    shapes, structure = jax.tree.flatten(one)
    places = [None] * len(shapes) if place is None else jax.tree.leaves(place)
    zeros = [jnp.zeros((depth, *x.shape), x.dtype, device=where) for x, where in zip(shapes, places, strict=True)]
    return structure.unflatten(zeros)


@partial(jax.jit, donate_argnums=0)
def _put_at(stack: Any, one: Any, turn: Int[Array, ""]) -> Any:
    """Return a stack with the arrays of a layer written at index `turn`."""
    return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, turn, 0), stack, one)

"""One model over the chips of a mesh, split by `models.sharding`: its attention, and the arrays of a decoder.

Each chip writes and reads its own KV heads by unsharded kernels, and the records of all chips
are summed. The compiler shards the rest, and sums the products of split weights.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, get_args

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey, SequenceKey
from jaxtyping import Array, Float

from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.models.sharding import AXIS, of_chip, shardings
from et_jax.softmax import Softmax

T = TypeVar("T")

_SPLIT = ("k", "h", "v")
"""The axes of arrays that are split, by the letters of their annotations: KV heads, query heads and vocabulary."""


def split(tree: T) -> T:
    """Return how each array of a tree is split: by the heads or vocabulary axis of its field's annotation."""

    def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        owner: Any = tree
        for key in path[:-1]:
            owner = _below(owner, key)
        named = bool(path) and isinstance(path[-1], GetAttrKey)
        letters = _letters(type(owner), path[-1].name) if named else ()
        return PartitionSpec(*(AXIS if letter in _SPLIT else None for letter in _spelt_out(letters, x.ndim)))

    return jax.tree_util.tree_map_with_path(spec, tree)


def by_heads(
    attend: Callable[..., tuple[Array, LayerCache, Any]],
    plant: Plant,
    softmax: Softmax,
    chunk: Chunk,
    reader: Any,
    q: Float[Array, "r t h d"],
    k: Float[Array, "r t k d"],
    v: Float[Array, "r t k d"],
    cached: LayerCache,
    surprisal: Float[Array, "p s"] | None,
) -> tuple[Float[Array, "r t h d"], LayerCache, Any]:
    """Return what `attend` returns for one layer, computed on every chip for its own heads."""
    mesh = mesh_of(plant)
    own = dataclasses.replace(plant, model=of_chip(plant.model, mesh), mesh=None)

    def here(*given: Any) -> tuple[Array, LayerCache, Any]:
        return attend(own, *given)

    heads, pages, everywhere = PartitionSpec(None, None, AXIS), split(cached), PartitionSpec()
    alone = functools.partial(attend, dataclasses.replace(plant, mesh=None))
    _, _, records = jax.eval_shape(alone, softmax, chunk, reader, q, k, v, cached, surprisal)
    return jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(*split((softmax, chunk, reader)), heads, heads, heads, pages, everywhere),
        out_specs=(heads, pages, split(records)),
        check_vma=False,  # kernels do not declare over which axes their outputs vary
    )(softmax, chunk, reader, q, k, v, cached, surprisal)


def over_vocabulary(mesh: Mesh, logits: Float[Array, "*b v"]) -> Float[Array, "*b v"]:
    """Return logits with the vocabulary split over the chips.

    Sampling and the moments of entropy only reduce over the vocabulary, so the chips exchange numbers per row.
    """
    return jax.lax.with_sharding_constraint(logits, shardings(mesh, PartitionSpec(*[None] * (logits.ndim - 1), AXIS)))


def returning_split(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a decoder whose returned state is split like its argument, and its outputs likewise."""

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        returned = function(*given, **named)
        return jax.lax.with_sharding_constraint(returned, shardings(mesh, split(returned)))

    return run


def mesh_of(plant: Plant) -> Mesh:
    """Return the mesh that a plant is split over. Raises ValueError for a plant on one chip."""
    if plant.mesh is None:
        raise ValueError("plant: got one on one chip, wanted one over a mesh")
    return plant.mesh


def _below(owner: Any, key: Any) -> Any:
    """Return the child of a node under a key."""
    if isinstance(key, GetAttrKey):
        return getattr(owner, key.name)
    if isinstance(key, DictKey):
        return owner[key.key]
    assert isinstance(key, SequenceKey)
    return owner[key.idx]


@functools.cache
def _letters(owner: type, name: str) -> tuple[str, ...]:
    """Return the letters of the axes of a field whose annotation has a split axis; none for others."""
    [kind] = (field.type for field in dataclasses.fields(owner) if field.name == name)
    spelt = [getattr(one, "dim_str", "").split() for one in (kind, *get_args(kind))]
    return next((tuple(letters) for letters in spelt if not set(_SPLIT).isdisjoint(letters)), ())


def _spelt_out(letters: tuple[str, ...], ndim: int) -> tuple[str, ...]:
    """Return the letters of all axes, with a variadic one expanded."""
    for place, letter in enumerate(letters):
        if letter.startswith("*"):
            return *letters[:place], *[letter] * (ndim - len(letters) + 1), *letters[place + 1 :]
    return letters

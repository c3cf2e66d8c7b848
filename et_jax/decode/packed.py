"""A layer's record as one array of words: a loop over layers on a GPU launches a store for each array."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from et_jax.types import pytree, static


@pytree
class Packed:
    """A tree of arrays of 32 bits with an entry for each row. `shapes` and `dtypes` are those of one layer's leaves."""

    words: UInt32[Array, "*l r w"]
    tree: Any = static()
    shapes: tuple[tuple[int, ...], ...] = static()
    dtypes: tuple[Any, ...] = static()


def packed(tree: Any) -> Any:
    """Return a tree as `Packed`, or unchanged if it has one leaf or a leaf with other numbers of rows or bits."""
    leaves, structure = jax.tree.flatten(tree)
    rows = {x.shape[0] if x.ndim else 0 for x in leaves}
    if len(leaves) < 2 or len(rows) > 1 or any(x.dtype.itemsize != 4 for x in leaves):
        return tree
    words = [jax.lax.bitcast_convert_type(x, jnp.uint32).reshape(len(x), -1) for x in leaves]
    shapes, dtypes = tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves)
    return Packed(words=jnp.concatenate(words, axis=1), tree=structure, shapes=shapes, dtypes=dtypes)


def unpacked(tree: Any) -> Any:
    """Return a tree with its `Packed` trees restored, with further axes of layers in front."""
    return jax.tree.map(_unpacked, tree, is_leaf=_is_packed)


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


def _unpacked(x: Any) -> Any:
    if not _is_packed(x):
        return x
    leaves, first = [], 0
    for shape, dtype in zip(x.shapes, x.dtypes, strict=True):
        size = math.prod(shape[1:])
        words = x.words[..., first : first + size].reshape(*x.words.shape[:-2], *shape)
        leaves.append(jax.lax.bitcast_convert_type(words, dtype))
        first += size
    return jax.tree.unflatten(x.tree, leaves)

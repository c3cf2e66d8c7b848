"""Records as one array of words, those of a layer and the outputs of a step.

A loop on a GPU launches a store for each array, and the host copies each array of a burst by itself.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from et_jax.types import pytree, static


@pytree
class Packed:
    """A tree of arrays with an entry for each row. `shapes` and `dtypes` are those of the leaves of one record.

    `words` has further axes, of layers or steps, in front. It is an array of a device, or of numpy once fetched.
    """

    words: UInt32[Array, "*l r w"] | UInt32[np.ndarray, "*l r w"]
    tree: Any = static()
    shapes: tuple[tuple[int, ...], ...] = static()
    dtypes: tuple[Any, ...] = static()


def packed(tree: Any) -> Any:
    """Return a tree of masks and 32-bit numbers as `Packed`.

    A tree of one leaf, and one with a leaf of another number of rows or of other numbers, is returned unchanged.
    """
    leaves, structure = jax.tree.flatten(tree)
    rows = {x.shape[0] if x.ndim else 0 for x in leaves}
    if len(leaves) < 2 or len(rows) > 1 or any(x.dtype != bool and x.dtype.itemsize != 4 for x in leaves):
        return tree
    words = [_words(x).reshape(len(x), -1) for x in leaves]
    shapes, dtypes = tuple(x.shape for x in leaves), tuple(x.dtype for x in leaves)
    return Packed(words=jnp.concatenate(words, axis=1), tree=structure, shapes=shapes, dtypes=dtypes)


def unpacked(tree: Any) -> Any:
    """Return a tree with its `Packed` trees restored, with the further axes of their words in front."""
    return jax.tree.map(_unpacked, tree, is_leaf=_is_packed)


def _words(x: Array) -> UInt32[Array, "..."]:
    return x.astype(jnp.uint32) if x.dtype == bool else jax.lax.bitcast_convert_type(x, jnp.uint32)


def _is_packed(x: Any) -> bool:
    return isinstance(x, Packed)


def _unpacked(x: Any) -> Any:
    if not _is_packed(x):
        return x
    leaves, first = [], 0
    for shape, dtype in zip(x.shapes, x.dtypes, strict=True):
        size = math.prod(shape[1:])
        words = x.words[..., first : first + size].reshape(*x.words.shape[:-2], *shape)
        leaves.append(words != 0 if dtype == np.dtype(bool) else words.view(dtype))
        first += size
    return jax.tree.unflatten(x.tree, leaves)

"""Rows of different lengths on a device that processes them sequentially.

A batched walk over rows takes as long as its longest row. With a single active sequence, a decoder with many slots
would also walk the empty rows. A row's result is bitwise independent of the batch if several queries
share a KV head; a single query uses other multiply instructions than two do.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

Rows = TypeVar("Rows", bound=PyTree[Array])
Found = TypeVar("Found", bound=PyTree[Array])

# Measured on x86-64 with two cores, 512 to 16k tokens: the overhead of a step of a walk, in rows.
STEP = 1.5


def in_tiles(walk: Callable[[Rows], Found], size: int, lengths: Int[Array, " b"], rows: Rows) -> Found:
    """Return the results of `walk` for rows, all leaves "b ...", in tiles of `size` rows of similar `lengths`.

    The last tile is padded with rows of zeros.
    """
    b = len(lengths)
    if size >= b:
        return walk(rows)
    order = jnp.argsort(lengths)
    number = -(-b // size)
    # rows of zeros come first, beside the shortest
    padded = jnp.pad(order, (number * size - b, 0), constant_values=b)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(b))

    def tile(x: Array) -> Array:
        return x.at[padded].get(mode="fill", fill_value=0).reshape(number, size, *x.shape[1:])

    def row_by_row(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[-b:][place]

    return jax.tree.map(row_by_row, lax.map(walk, jax.tree.map(tile, rows)))


def apart_or_together(walk: Callable[[Rows], Found], lengths: Int[Array, " b"], rows: Rows) -> Found:
    """Return the results of `walk` for rows, all leaves "b ...", batched or one by one, whichever is less work.

    `lengths` is the number of tokens of each row. Both ways are compiled.
    """

    def one(row: Rows) -> Found:
        return jax.tree.map(lambda x: x[0], walk(jax.tree.map(lambda x: x[None], row)))

    steps = lengths.astype(jnp.float32)
    separately, together = (STEP + 1) * jnp.sum(steps), (STEP + len(lengths)) * jnp.max(steps, initial=0.0)
    return lax.cond(separately <= together, lambda rows: lax.map(one, rows), walk, rows)

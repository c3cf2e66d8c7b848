"""Rows whose work differs in length, on a device that does one thing after another.

Rows that are walked together all take as long as the longest. An engine with room for many sequences that serves one
would walk the empty rows beside it. What is walked of a row has the same bits in any company where several queries
share a KV head; one query alone is multiplied by other instructions than two.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Int, PyTree

Rows = TypeVar("Rows", bound=PyTree[Array])
Found = TypeVar("Found", bound=PyTree[Array])

# Measured on x86-64 with two cores, 512 to 16k tokens: what a step of a walk takes beside its rows, in rows.
STEP = 1.5


def in_tiles(walk: Callable[[Rows], Found], size: int, lengths: Int[Array, " b"], rows: Rows) -> Found:
    """Return what `walk` finds of rows, all leaves "b ...", `size` of them at a time, those of like `lengths` together.

    The last tile is filled up with rows of zeros.
    """
    b = len(lengths)
    if size >= b:
        return walk(rows)
    order = jnp.argsort(lengths)
    number = -(-b // size)
    # rows of zeros stand first, beside the shortest
    padded = jnp.pad(order, (number * size - b, 0), constant_values=b)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(b))

    def tile(x: Array) -> Array:
        return x.at[padded].get(mode="fill", fill_value=0).reshape(number, size, *x.shape[1:])

    def row_by_row(x: Array) -> Array:
        return x.reshape(-1, *x.shape[2:])[-b:][place]

    return jax.tree.map(row_by_row, lax.map(walk, jax.tree.map(tile, rows)))


def apart_or_together(walk: Callable[[Rows], Found], lengths: Int[Array, " b"], rows: Rows) -> Found:
    """Return what `walk` finds of rows, all leaves "b ...", given together or each alone, whichever is less.

    `lengths` is what each row has to be walked for. Both ways are compiled.
    """

    def one(row: Rows) -> Found:
        return jax.tree.map(lambda x: x[0], walk(jax.tree.map(lambda x: x[None], row)))

    steps = lengths.astype(jnp.float32)
    alone, together = (STEP + 1) * jnp.sum(steps), (STEP + len(lengths)) * jnp.max(steps, initial=0.0)
    return lax.cond(alone <= together, lambda rows: lax.map(one, rows), walk, rows)

"""Rows whose work differs in length, on a device that does one thing after another: together, or each alone.

Rows that are walked together all take as long as the longest. An engine with room for many sequences that serves one
would walk the empty rows beside it.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, PyTree

Rows = TypeVar("Rows", bound=PyTree)
Found = TypeVar("Found", bound=PyTree)

# Measured on x86-64 with two cores: rows one after the other take up to twice as long as together where they are alike.
DEARER = 2


def apart_or_together(walk: Callable[[Rows], Found], lengths: Int[Array, " b"], rows: Rows) -> Found:
    """Return what `walk` finds of rows, all its leaves "b ...", given together or each alone, whichever is less.

    `lengths` is what each row has to be walked for. `walk` finds the same of a row in either way, in another shape.
    """

    def one(row: Rows) -> Found:
        return jax.tree.map(lambda x: x[0], walk(jax.tree.map(lambda x: x[None], row)))

    apart = DEARER * jnp.sum(lengths) <= len(lengths) * jnp.max(lengths, initial=0)
    return lax.cond(apart, lambda rows: lax.map(one, rows), walk, rows)

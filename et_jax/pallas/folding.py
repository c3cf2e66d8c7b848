"""Rows of one slot that attend to its pages together: their queries form one group."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def most_together(rows_per_slot: int, fits: Callable[[int], bool]) -> int:
    """Return how many rows of a slot to fold: the greatest divisor of their number that `fits`; 1 always does."""
    return next(rows for rows in range(rows_per_slot, 0, -1) if rows_per_slot % rows == 0 and (rows == 1 or fits(rows)))


def split(
    rows_per_slot: int,
    rows: int,
    page_table: Int[Array, "b n"],
    *lists: Int[Array, "b k ..."] | None,
    readers: Int[Array, "b k m"] | None,
) -> tuple[Any, ...]:
    """Return the table, lists and readers as if every slot were several slots of `rows` rows each."""
    parts = rows_per_slot // rows
    if parts == 1:
        return page_table, *lists, readers
    repeated = (None if x is None else jnp.repeat(x, parts, axis=0) for x in (page_table, *lists))
    if readers is not None:
        first = jnp.tile(jnp.arange(parts, dtype=jnp.int32) * rows, len(readers))
        readers = jnp.repeat(readers, parts, axis=0) >> first[:, None, None]
    return *repeated, readers


def by_head(q: Shaped[Array, "r h d"], num_kv_heads: int, rows: int) -> Shaped[Array, "b k q d"]:
    """Return the queries of each KV head of a slot, row after row."""
    r, h, d = q.shape
    if rows == 1:
        return q.reshape(r, num_kv_heads, -1, d)
    apart = q.reshape(-1, rows, num_kv_heads, h // num_kv_heads, d).swapaxes(1, 2)
    return apart.reshape(r // rows, num_kv_heads, -1, d)


def by_row(x: Shaped[Array, "b k q d"], rows: int) -> Shaped[Array, "r h d"]:
    """Return the inverse of `by_head`: the array that it was given."""
    b, k, queries, d = x.shape
    if rows > 1:
        x = x.reshape(b, k, rows, queries // rows, d).swapaxes(1, 2)
    return x.reshape(b * rows, -1, d)

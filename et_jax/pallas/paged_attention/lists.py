"""The blocks that are read without a list: in order, all that the rows of a slot attend to."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from et_jax.softmax import Softmax


def most_seen(num_blocks: int, page_size: int, rows_per_slot: int, window: int | None) -> int:
    """Return the most blocks that the rows of a slot attend to; each row is one token longer than the previous one."""
    if window is None:
        return num_blocks
    return min(num_blocks, (window + rows_per_slot + page_size - 3) // page_size + 1)


def seen(
    lengths: Sequence[Int[Array, "..."]], page_size: int, window: int | None, skipped: Int[Array, "..."] | None = None
) -> tuple[Int[Array, "..."], Int[Array, "..."]]:
    """Return the first block that a row of a slot attends to, and the number of blocks from it on.

    Blocks before `skipped` are excluded. A row of length 0 attends to nothing. This is plain integer arithmetic, which
    kernels run for one slot at a time.
    """
    longest = functools.reduce(jnp.maximum, lengths)
    num_blocks = lax.div(longest + (page_size - 1), jnp.int32(page_size))
    first = jnp.zeros_like(num_blocks)
    if window is not None:
        shortest = functools.reduce(jnp.minimum, [jnp.where(each > 0, each, longest) for each in lengths])
        first = lax.div(jnp.maximum(shortest - window, 0), jnp.int32(page_size))
    if skipped is not None:
        first = jnp.maximum(first, skipped)
    first = jnp.minimum(first, num_blocks)
    return first, num_blocks - first


def lengths_of(lengths_ref: Any, slot: Any, rows: int, rows_per_slot: int) -> list[Any]:
    """Return, in a kernel, the lengths of the `rows` of the slot's `rows_per_slot` rows that it processes."""
    row = lax.div(slot * rows, jnp.int32(rows_per_slot)) * rows_per_slot
    return [lengths_ref[row + i] for i in range(rows_per_slot)]


def count_of(
    lengths_ref: Any,
    counts_ref: Any,
    skipped_ref: Any,
    slot: Any,
    head: Any,
    *,
    page_size: int,
    window: int | None,
    rows: int,
    rows_per_slot: int,
    most: int,
) -> Any:
    """Return, in a kernel, how many blocks a KV head of a slot reads: those of its list, at `most`, or all `seen`."""
    if counts_ref is not None:
        return jnp.minimum(counts_ref[slot, head], most)
    skipped = None if skipped_ref is None else skipped_ref[slot, head]
    return seen(lengths_of(lengths_ref, slot, rows, rows_per_slot), page_size, window, skipped)[1]


def listed(
    lengths: Int[Array, " r"],
    rows_per_slot: int,
    num_blocks: int,
    num_kv_heads: int,
    page_size: int,
    softmax: Softmax,
    skipped: Int[Array, "b k"] | None,
) -> tuple[Int[Array, "b k m"], Int[Array, "b k"]]:
    """Return the lists of all `seen` blocks, for each KV head of each slot, and their lengths."""
    by_row = lengths.reshape(-1, rows_per_slot, 1)
    rows = [by_row[:, row] for row in range(rows_per_slot)]
    first, counts = seen(rows, page_size, softmax.window, skipped)
    most = most_seen(num_blocks, page_size, rows_per_slot, softmax.window)
    blocks = jnp.minimum(first[..., None] + jnp.arange(most, dtype=jnp.int32), num_blocks - 1)
    shape = (len(by_row), num_kv_heads)
    return jnp.broadcast_to(blocks, (*shape, most)), jnp.broadcast_to(counts, shape)

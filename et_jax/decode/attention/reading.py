"""Calls of the attention kernels in a step: with one list of blocks per row, or one for all rows of a slot."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.softmax import Softmax


def read_all(
    plant: Plant,
    softmax: Softmax,
    queries: Float[Array, "q c d"],
    cached: LayerCache,
    chunk: Chunk,
    skipped: Int[Array, "r k"] | None = None,
    block_sums: bool = True,
) -> tuple[Float[Array, "_ h d"], Float[Array, "_ h m"] | None]:
    """Return attention to every block within the window of the `softmax`, and the log-sum-exp of each block's scores.

    Without `block_sums` those are None. They are in the order of the blocks, from the first that one of the rows read
    together may attend to. Each KV head starts after its `skipped` blocks, as many for all rows that are read together,
    and the sums are in order from there.
    """
    at, (table, layers) = chunk.at, own_pages(chunk, cached)
    if skipped is not None:
        layers["skipped"] = skipped if at is None else skipped[at[:, 0]]
    return _read(plant, softmax, queries, cached, table, None, None, chunk.lengths, at, block_sums=block_sums, **layers)


def read_selected(
    plant: Plant,
    softmax: Softmax,
    queries: Float[Array, "q c d"],
    cached: LayerCache,
    chunk: Chunk,
    listed: Int[Array, "r k m"],
    counts: Int[Array, "r k"],
    opened: Bool[Array, "r k n"],
) -> tuple[Float[Array, "_ h d"], Float[Array, "_ h m"]]:
    """Return attention to each row's `opened` blocks, and the log-sum-exp of the scores of each listed one.

    The first `counts` of the `listed` blocks are the opened ones, in ascending order.
    """
    at, (table, layers), readers = chunk.at, own_pages(chunk, cached), None
    if at is not None:
        listed, counts = list_blocks(jnp.any(opened[at], axis=1))
        bits = jnp.left_shift(1, jnp.arange(at.shape[1], dtype=jnp.int32))
        by_block = jnp.sum(jnp.where(opened[at], bits[:, None, None], 0), axis=1)
        readers = jnp.take_along_axis(by_block, listed, axis=2)
    out, block_lse = _read(plant, softmax, queries, cached, table, listed, counts, chunk.lengths, at, readers, **layers)
    assert block_lse is not None
    return out, block_lse


def read_listed(
    plant: Plant,
    softmax: Softmax,
    queries: Float[Array, "r c d"],
    cached: LayerCache,
    table: Int[Array, "r n"],
    listed: Int[Array, "r k m"],
    counts: Int[Array, "r k"],
    lengths: Int[Array, " r"],
) -> Float[Array, "r h d"]:
    """Return attention to the first `counts` blocks of each row's and KV head's list."""
    out, _ = _read(plant, softmax, queries, cached, table, listed, counts, lengths, None, block_sums=False)
    return out


def own_pages(chunk: Chunk, cached: LayerCache) -> tuple[Int[Array, "r n"], dict[str, Any]]:
    """Return the page table of a chunk in one layer and, for stacked layers, its turn and their number."""
    if chunk.turn is None or chunk.own_table is None:
        return chunk.table, {}
    return chunk.own_table, {"turn": chunk.turn, "depth": cached.depth}


def list_blocks(mask: Bool[Array, "b k n"]) -> tuple[Int[Array, "b k n"], Int[Array, "b k"]]:
    """Return the ids of the True blocks in ascending order, and their number; the rest is padding."""
    num_blocks = mask.shape[-1]
    running = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    place = jnp.where(mask, running - 1, num_blocks)
    row, head = (jnp.arange(size)[:, None] for size in mask.shape[:2])
    padding = jnp.full(mask.shape, num_blocks - 1, jnp.int32)
    listed = padding.at[row[:, :, None], head, place].set(jnp.arange(num_blocks, dtype=jnp.int32), mode="drop")
    return listed, running[..., -1]


def _read(
    plant: Plant,
    softmax: Softmax,
    queries: Float[Array, "q c d"],
    cached: LayerCache,
    table: Int[Array, "r n"],
    listed: Int[Array, "s k m"] | None,
    counts: Int[Array, "s k"] | None,
    lengths: Int[Array, " r"],
    at: Int[Array, "s t"] | None,
    readers: Int[Array, "s k m"] | None = None,
    **more: Any,
) -> tuple[Float[Array, "_ h d"], Float[Array, "_ h m"] | None]:
    rows_per_slot = 1
    if at is not None:  # no queries beyond the rows remain
        row, rows_per_slot = at.reshape(-1), at.shape[1]
        num_rows, queries, table, lengths = len(table), queries[row], table[at[:, 0]], lengths[row]
    found = paged_attention(
        queries,
        cached.pages,
        table,
        listed,
        counts,
        lengths,
        softmax=softmax,
        rows_per_slot=rows_per_slot,
        readers=readers,
        kv_scales=cached.kv_scales,
        num_heads=plant.model.num_heads,
        backend=plant.backend,
        **more,
    )
    if at is None:
        return found
    out, block_lse = jax.tree.map(lambda x: jnp.zeros((num_rows, *x.shape[1:]), x.dtype).at[row].set(x), found)
    return out, block_lse

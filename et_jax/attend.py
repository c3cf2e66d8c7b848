"""Attention over the paged cache, as the model is handed it: write, choose blocks, read them, note what was read.

This is where the cache, the selectors and the kernels meet. The step and the prefill each make an
`attend` for `models.transformer.forward`; what it threads through the layers is a `Memory`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.cache import KVCache, LayerCache, write
from et_jax.control.base import pack_blocks
from et_jax.control.select import BlockView, Selector
from et_jax.models.config import ModelConfig
from et_jax.models.transformer import Attend
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.types import pytree, replace


@pytree
class Receipts:
    """What attention read, gathered over the layers run so far.

    `blocks_read` counts blocks over layers and KV heads, `summaries_read` likewise where a selector
    looked; `kept_mass` is the least share of attention mass on the blocks read, over layers and heads;
    `block_masks` holds each layer's packed mask.
    """

    blocks_read: Int[Array, " b"]
    summaries_read: Int[Array, " b"]
    kept_mass: Float[Array, " b"]
    block_masks: tuple[UInt32[Array, "b k n32"], ...]


@pytree
class Memory:
    """The cache on its way through the layers, and the receipts so far."""

    cache: KVCache
    receipts: Receipts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How attention reads the cache: the model's shape, the page size, a selector per layer, the backend."""

    model: ModelConfig
    page_size: int
    selectors: tuple[Selector, ...]
    backend: str

    @property
    def scale(self) -> float:
        """Factor on query . key."""
        return self.model.head_dim**-0.5


def start_receipts(batch: int) -> Receipts:
    """Return receipts of nothing read."""
    zeros = jnp.zeros(batch, jnp.int32)
    return Receipts(blocks_read=zeros, summaries_read=zeros, kept_mass=jnp.ones(batch, jnp.float32), block_masks=())


def decode_attend(
    reading: Reading,
    table: Int[Array, "b n"],
    length: Int[Array, " b"],
    run: Bool[Array, " b"],
    tolerance: Float[Array, " b"],
) -> Attend:
    """Return the `attend` of one decode step: row b's new token sits at position `length[b]`.

    Rows where `run` is False write nothing and read nothing.
    """
    count = run.astype(jnp.int32)
    lengths = jnp.where(run, length + 1, 0)

    def attend(layer: int, q: Array, k: Array, v: Array, memory: Memory) -> tuple[Array, Memory]:
        cached = write(memory.cache.layers[layer], k, v, table, length, count)
        window = reading.model.windows[layer]
        selector = reading.selectors[layer]
        queries = q[:, 0]
        if selector.reads_all:
            blocks, counts = _every_block(lengths, reading, table.shape[1], window)
            mask = None
        else:
            mask = _select(selector, queries, cached, table, lengths, tolerance, reading, window)
            blocks, counts = list_blocks(mask)
        out, block_lse = paged_attention(
            queries,
            cached.pages,
            table,
            blocks,
            counts,
            lengths,
            scale=reading.scale,
            window=window,
            backend=reading.backend,
        )
        seen = memory.receipts
        if mask is None:
            readable = _readable(lengths, table.shape[1], reading.page_size, window)
            bits = jnp.broadcast_to(readable[:, None], (*counts.shape, table.shape[1]))
            summaries, kept = seen.summaries_read, seen.kept_mass
        else:
            bits = mask
            held = _held_blocks(lengths, reading.page_size)
            summaries = seen.summaries_read + held * reading.model.num_kv_heads
            kept = jnp.minimum(
                seen.kept_mass, _kept_mass(queries, block_lse, mask, cached, table, lengths, reading, window)
            )
        receipts = Receipts(
            blocks_read=seen.blocks_read + jnp.sum(counts, axis=1),
            summaries_read=summaries,
            kept_mass=kept,
            block_masks=(*seen.block_masks, pack_blocks(bits)),
        )
        return out[:, None], Memory(cache=_with_layer(memory.cache, layer, cached), receipts=receipts)

    return attend


def prefill_attend(
    reading: Reading, table: Int[Array, "b n"], start: Int[Array, " b"], count: Int[Array, " b"]
) -> Attend:
    """Return the `attend` of a prompt chunk: `count[b]` tokens from position `start[b]` on, read densely."""

    def attend(layer: int, q: Array, k: Array, v: Array, memory: KVCache) -> tuple[Array, KVCache]:
        cached = write(memory.layers[layer], k, v, table, start, count)
        out = paged_prefill(
            q,
            cached.pages,
            table,
            start,
            scale=reading.scale,
            window=reading.model.windows[layer],
            backend=reading.backend,
        )
        return out, _with_layer(memory, layer, cached)

    return attend


def list_blocks(mask: Bool[Array, "b k n"]) -> tuple[Int[Array, "b k n"], Int[Array, "b k"]]:
    """Return the ids of the True blocks in ascending order, and how many there are; the rest is padding."""
    running = jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
    wanted = jnp.arange(1, mask.shape[-1] + 1, dtype=jnp.int32)
    find = jax.vmap(jax.vmap(lambda row: jnp.searchsorted(row, wanted)))
    return jnp.minimum(find(running), mask.shape[-1] - 1).astype(jnp.int32), running[..., -1]


def _held_blocks(lengths: Int[Array, " b"], page_size: int) -> Int[Array, " b"]:
    return (lengths + page_size - 1) // page_size


def _first_block(lengths: Int[Array, " b"], page_size: int, window: int | None) -> Int[Array, " b"]:
    """The first block a query at the last position may see."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // page_size


def _every_block(
    lengths: Int[Array, " b"], reading: Reading, num_blocks: int, window: int | None
) -> tuple[Int[Array, "b k m"], Int[Array, "b k"]]:
    """List every block within the window, for every KV head."""
    most = num_blocks if window is None else min(num_blocks, (window + reading.page_size - 2) // reading.page_size + 1)
    first = _first_block(lengths, reading.page_size, window)
    blocks = jnp.minimum(first[:, None] + jnp.arange(most, dtype=jnp.int32), num_blocks - 1)
    counts = _held_blocks(lengths, reading.page_size) - first
    shape = (lengths.shape[0], reading.model.num_kv_heads)
    return jnp.broadcast_to(blocks[:, None], (*shape, most)), jnp.broadcast_to(counts[:, None], shape)


def _readable(lengths: Int[Array, " b"], num_blocks: int, page_size: int, window: int | None) -> Bool[Array, "b n"]:
    block = jnp.arange(num_blocks)
    first, held = _first_block(lengths, page_size, window), _held_blocks(lengths, page_size)
    return (block >= first[:, None]) & (block < held[:, None])


def _select(
    selector: Selector,
    queries: Float[Array, "b h d"],
    cached: LayerCache,
    table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    tolerance: Float[Array, " b"],
    reading: Reading,
    window: int | None,
) -> Bool[Array, "b k n"]:
    """Ask the selector, for every row and KV head, and keep what holds whatever it says."""
    d, num_blocks, page_size = reading.model.head_dim, table.shape[1], reading.page_size
    start = jnp.arange(num_blocks, dtype=jnp.int32) * page_size

    def one(query: Array, box: Array, mean: Array, radius: Array, length: Array, tolerance: Array) -> Array:
        view = BlockView(
            query=query,
            key_min=box[:, :d].astype(jnp.float32),
            key_max=box[:, d : 2 * d].astype(jnp.float32),
            key_mean=mean[:, :d],
            value_mean=mean[:, d : 2 * d],
            value_radius=radius,
            start=start,
            num_tokens=jnp.clip(length - start, 0, page_size),
            length=length,
            tolerance=tolerance,
        )
        return selector(view)

    summary = cached.summary
    heads = jax.vmap(one, in_axes=(0, 0, 0, 0, None, None))
    of_slot = [x.swapaxes(0, 1) for x in (summary.key_box[:, table], summary.mean[:, table])]
    radius = summary.value_radius[:, table].swapaxes(0, 1)
    rows: Callable[..., Array] = jax.vmap(heads)
    asked = rows(_grouped(queries, reading), *of_slot, radius, lengths, tolerance)
    newest = start == jnp.maximum(lengths[:, None] - 1, 0) // page_size * page_size
    readable = _readable(lengths, num_blocks, page_size, window)
    return (asked | newest[:, None]) & readable[:, None]


def _grouped(queries: Float[Array, "b h d"], reading: Reading) -> Float[Array, "b k g d"]:
    """Queries by KV head, float32, scaled so that query . key is the score."""
    b, _, d = queries.shape
    return queries.astype(jnp.float32).reshape(b, reading.model.num_kv_heads, -1, d) * reading.scale


def _kept_mass(
    queries: Float[Array, "b h d"],
    block_lse: Float[Array, "b h m"],
    mask: Bool[Array, "b k n"],
    cached: LayerCache,
    table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    reading: Reading,
    window: int | None,
) -> Float[Array, " b"]:
    """Estimate the least share of attention mass read, over heads: unread blocks count n exp(q . mean key).

    By Jensen's inequality an unread block holds at least that much, so the estimate never understates.
    """
    d, num_blocks, page_size = reading.model.head_dim, table.shape[1], reading.page_size
    key_mean = cached.summary.mean[:, table][..., :d].swapaxes(0, 1)  # "b k n d"
    score = jnp.einsum("bkgd,bknd->bkgn", _grouped(queries, reading), key_mean)
    num_tokens = jnp.clip(lengths[:, None] - jnp.arange(num_blocks) * page_size, 0, page_size)
    unread = _readable(lengths, num_blocks, page_size, window)[:, None] & ~mask
    log_count = jnp.log(jnp.maximum(num_tokens, 1).astype(jnp.float32))[:, None, None]
    left = jnp.where(unread[:, :, None], score + log_count, -jnp.inf)
    read = jax.nn.logsumexp(block_lse, axis=-1).reshape(left.shape[:3])
    ratio = jnp.exp(jax.nn.logsumexp(left, axis=-1) - read)
    kept = 1.0 / (1.0 + jnp.where(jnp.isfinite(read), ratio, 0.0))
    return jnp.min(kept, axis=(1, 2))


def _with_layer(cache: KVCache, layer: int, cached: LayerCache) -> KVCache:
    return replace(cache, layers=(*cache.layers[:layer], cached, *cache.layers[layer + 1 :]))

"""Self-drafting: the blocks with most of a model's attention mass, and a reader of only those.

No block is scored: attention returns the log-sum-exp of every block that it reads, and the blocks with the mass at one
token mostly have it at the next few.
"""

from collections.abc import Hashable
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import pack_blocks, unpack_blocks
from et_jax.decode.attention.reading import list_blocks, read_all, read_listed
from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.chunk import Chunk
from et_jax.decode.drafting.drafts import Pruned
from et_jax.decode.once import run_if
from et_jax.decode.plant import Plant
from et_jax.models.stacks import Layer, by_layer
from et_jax.softmax import Softmax, finite
from et_jax.sums import log_sum_exp, total
from et_jax.types import pytree, replace

NOTHING = -30.0
"""Nats: the log of a negligible share."""

_LEAST = -20.0  # nats: the log of the least share for which a block is read
_HALVINGS = 10  # of that range: a cut is found to a fiftieth of a nat


def log_shares(block_lse: Float[Array, "r h n"], num_kv_heads: int) -> Float[Array, "r k n"]:
    """Return the log of the share of mass on every block, in nats, the mean over the query heads of a KV head.

    `block_lse` has the log-sum-exps of the blocks, -inf for unread ones. No result is below `NOTHING`.
    """
    r, _, n = block_lse.shape
    share = jnp.exp(block_lse - finite(log_sum_exp(block_lse))[..., None])
    mean = total(share.reshape(r, num_kv_heads, -1, n), axis=2) / (block_lse.shape[1] // num_kv_heads)
    return jnp.maximum(jnp.log(mean), NOTHING)


def heavy_blocks(
    how: Pruned, log_share: Float[Array, "r l k n"], num_blocks: Int[Array, " r"]
) -> UInt32[Array, "r l k n32"]:
    """Return, packed, the fewest blocks of each KV head with a share `how.mass`, at most a share of `num_blocks`.

    They are those above one cut, which is found by bisection.
    """
    share = jnp.exp(log_share)
    most = jnp.ceil(how.share * num_blocks.astype(jnp.float32))[:, None, None]

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        opened = log_share >= middle[..., None]
        enough = total(jnp.where(opened, share, 0.0)) >= how.mass
        enough |= jnp.sum(opened, axis=-1, dtype=jnp.int32).astype(jnp.float32) > most
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    cut = jnp.full(log_share.shape[:3], _LEAST, jnp.float32), jnp.zeros(log_share.shape[:3], jnp.float32)
    for _ in range(_HALVINGS):
        cut = halve(cut)
    low, high = cut
    few = jnp.sum(log_share >= low[..., None], axis=-1, dtype=jnp.int32).astype(jnp.float32) <= most
    return pack_blocks(log_share >= jnp.where(few, low, high)[..., None])


@pytree
class RecordedRows:
    """The rows whose heavy blocks are recorded: those `asked`, whose sequences want a draft.

    `rows` has one row per slot; None if each slot has a single row. A sequence that wants no draft has no record even
    if others have: when it drafts does not depend on the batch.
    """

    rows: Int[Array, " s"] | None
    asked: Bool[Array, " s"]

    def of(self, x: Array) -> Array:
        """Return the entries of these rows in an array that leads with rows."""
        return x if self.rows is None else x[self.rows]


def heavy_of(
    how: Pruned, rows: RecordedRows, lses: tuple[Any, ...], blocks: Int[Array, " s"], masks: UInt32[Array, "r l k n32"]
) -> UInt32[Array, "s l k n32"]:
    """Return the `heavy_blocks` of all layers, none for rows that are not asked for; skips the work if none is.

    The last block, which every draft reads, is always among them: a row without any block has no record.
    `lses` has the log-sum-exps of the blocks, layer by layer; blocks are packed like `masks`.
    """

    def choose(_: Array, given: tuple) -> Array:
        lses, blocks, asked = given
        block_lse = by_layer(lses, lambda lse: lse, axis=1)
        s, layers, heads, n = block_lse.shape
        log_share = log_shares(block_lse.reshape(s * layers, heads, n), masks.shape[2])
        last = pack_blocks(jnp.arange(n) == (blocks - 1)[:, None, None, None])
        selected = heavy_blocks(how, log_share.reshape(s, layers, -1, n), blocks) | last
        return jnp.where(asked[:, None, None, None], selected, 0)

    nothing = jnp.zeros((len(blocks), *masks.shape[1:]), jnp.uint32)
    return run_if(jnp.any(rows.asked), choose, nothing, (lses, blocks, rows.asked))


@pytree
class Heavy:
    """Attention to the blocks listed for each row and KV head, and to all of a windowed layer; records how many.

    The lists are those of the entire draft: a block that is not written yet is skipped.
    """

    listed: Int[Array, "r l k m"]
    counts: Int[Array, "r l k"]

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return equal values: all layers are read by one program."""
        return (None,) * plant.model.num_layers

    def of_layer(self, plant: Plant, layer: Layer) -> "HeavyOfLayer":
        """Return the reader of a layer."""
        return HeavyOfLayer(listed=layer.of(self.listed, axis=1), counts=layer.of(self.counts, axis=1))

    def recorded(self, plant: Plant, chunk: Chunk, records: tuple[Any, ...]) -> Int[Array, " r"]:
        """Return the number of blocks read, over layers and KV heads."""
        return jnp.sum(by_layer(records, attrgetter("blocks"), axis=0), axis=(0, 2), dtype=jnp.int32)


@pytree
class HeavyOfLayer:
    """Attention of one layer to the listed blocks, one token a row: see `Heavy`."""

    listed: Int[Array, "r k m"]
    counts: Int[Array, "r k"]

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return False: rows are read one by one, because a slot has one."""
        return False

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "n 1 c d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "_ 1 h d"], "HeavyRead"]:
        """Return attention to the listed blocks, and their number."""
        lengths, size = chunk.lengths, plant.page_size
        queries = q[: len(lengths), 0]
        if softmax.window is not None:
            out, _ = read_all(plant, softmax, queries, cached, replace(chunk, at=None), block_sums=False)
            first = jnp.maximum(lengths - softmax.window, 0) // size
            blocks = -(-lengths // size) - first
            return out[:, None], HeavyRead(blocks=jnp.broadcast_to(blocks[:, None], self.counts.shape))
        out = read_listed(plant, softmax, queries, cached, chunk.table, self.listed, self.counts, lengths)
        there = (jnp.arange(self.listed.shape[2]) < self.counts[..., None]) & (
            self.listed * size < lengths[:, None, None]
        )
        return out[:, None], HeavyRead(blocks=jnp.sum(there, axis=2, dtype=jnp.int32))


@pytree
class HeavyRead:
    """The record of one layer: the number of blocks that each row and KV head read."""

    blocks: Int[Array, "r k"]


@jax.named_scope("list")
def heavy(
    how: Pruned,
    most: int,
    blocks: UInt32[Array, "r l k n32"],
    num_blocks: int,
    place: Int[Array, " r"],
    page_size: int,
    skipped: Int[Array, "r l k"] | None = None,
) -> Heavy:
    """Return the reader of drafts of up to `most` tokens after the one at its `place` in the cache.

    It reads the packed `blocks`, which were selected at the token before; the first valid block of each KV head, after
    the `skipped` ones; and those written since.
    """
    r, layers, heads, _ = blocks.shape
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    since = (jnp.maximum(place - 1, 0) // page_size)[:, None]
    newest = (block >= since) & (block <= (place[:, None] + most) // page_size)
    first = block == (jnp.zeros((r, 1, 1, 1), jnp.int32) if skipped is None else skipped[..., None])
    opened: Bool[Array, "r l k n"] = unpack_blocks(blocks)[..., :num_blocks] | newest[:, None, None] | first
    listed, counts = list_blocks(opened.reshape(r * layers, heads, num_blocks))
    width = min(num_blocks, how.room(num_blocks) + 3 + -(-most // page_size))
    return Heavy(
        listed=listed[..., :width].reshape(r, layers, heads, width),
        counts=jnp.minimum(counts, width).reshape(r, layers, heads),
    )

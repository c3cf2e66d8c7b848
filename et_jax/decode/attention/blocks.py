"""The blocks of sequences: the positions in each, and which of them a query may and must attend to."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from et_jax.decode.chunk import Chunk, Places
from et_jax.pallas.backend import platform
from et_jax.types import pytree, static


@pytree
class Extent:
    """The blocks of sequences: their positions, and which of them a query may and must attend to.

    `num_tokens` counts a block's tokens, 0 if a sliding window of the layer hides any of them. `readable` blocks
    contain a token visible to the query. `certain` blocks are read whatever a selector chooses: the newest, and the one
    that a window cuts.
    """

    start: Int[Array, "*b n"]
    num_tokens: Int[Array, "*b n"]
    readable: Bool[Array, "*b n"]
    certain: Bool[Array, "*b n"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The settings of a layer's blocks: the tokens of a page, and the window and soft cap of its softmax."""

    page_size: int
    window: int | None
    soft_cap: float | None = None

    def extent(self, length: Int[Array, "*b"], num_blocks: int) -> Extent:
        """Return the blocks of sequences whose query is at position `length - 1`."""
        start = jnp.arange(num_blocks, dtype=jnp.int32) * self.page_size
        block, length = jnp.arange(num_blocks), length[..., None]
        end = count_blocks(length, self.page_size)
        readable = (block >= first_block(length, self.page_size, self.window)) & (block < end)
        hidden = jnp.zeros_like(readable) if self.window is None else start < length - self.window
        return Extent(
            start=jnp.broadcast_to(start, readable.shape),
            num_tokens=jnp.where(hidden, 0, jnp.clip(length - start, 0, self.page_size)),
            readable=readable,
            certain=readable & ((block == end - 1) | hidden),
        )


@pytree
class Blocks(Extent):
    """The blocks of rows: `table` gives their pages, `length` the tokens of a row.

    For a cache that `depth` layers share, `table` numbers the pages of the layer `turn`; None for one layer. `last` is
    the page of each row's last token, if it was computed before the layers.
    """

    table: Int[Array, "b n"]
    length: Int[Array, " b"]
    turn: Int[Array, "1"] | None = None
    depth: int = static(default=1)
    last: Int[Array, " b"] | None = None

    @property
    def most_blocks(self) -> Int[Array, ""]:
        """The number of blocks of the longest row."""
        return jnp.max(jnp.where(self.readable, jnp.arange(1, self.readable.shape[1] + 1), 0), initial=0)


def widened(table: Int[Array, "b n"]) -> Int[Array, "b m"]:
    """Return page tables, on a GPU padded with the null page to a power of two, the only sizes of its kernels."""
    if platform() != "gpu":
        return table
    num_blocks = table.shape[1]
    return jnp.pad(table, ((0, 0), (0, max(32, 1 << (num_blocks - 1).bit_length()) - num_blocks)))


def places_of(chunk: Chunk, page_size: int) -> Places:
    """Return the places of a chunk of one token a row."""
    lengths, block = chunk.lengths, jnp.maximum(chunk.lengths - 1, 0) // page_size
    last = jnp.take_along_axis(chunk.table, block[:, None], axis=1)[:, 0]
    full = (lengths > 0) & (chunk.end >= (block + 1) * page_size)
    return Places(wide=widened(chunk.table), last=last, full=jnp.where(full, last, 0))


def count_blocks(length: Int[Array, "*b"], page_size: int) -> Int[Array, "*b"]:
    """Return how many blocks sequences of these lengths have."""
    return (length + page_size - 1) // page_size


def first_block(length: Int[Array, "*b"], page_size: int, window: int | None) -> Int[Array, "*b"]:
    """Return the first block that a query at the last position may attend to."""
    return jnp.zeros_like(length) if window is None else jnp.maximum(length - window, 0) // page_size


def blocks_of(table: Int[Array, "b n"], length: Int[Array, " b"], page_size: int, window: int | None) -> Blocks:
    """Return the blocks of rows whose query is at position `length - 1`."""
    layer = LayerKind(page_size=page_size, window=window)
    return Blocks(table=table, length=length, **vars(layer.extent(length, table.shape[1])))

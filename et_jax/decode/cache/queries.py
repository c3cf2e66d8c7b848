"""The last queries of every sequence, by which a compression ranks entries.

They are stored in a ring per slot, that of position p at place p mod its size. With drafts the ring has extra room,
so that the queries of rejected tokens overwrite none that are ranked by.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.decode.chunk import Chunk
from et_jax.types import pytree


@pytree
class Watch:
    """The tokens of a forward pass whose queries are stored: `token[r, i]` of row r, at `position[r, i]`.

    Those where `stored` is False are skipped. `slot` is that of every row, None if rows are the slots in order.
    """

    slot: Int[Array, " r"] | None
    token: Int[Array, "r i"]
    position: Int[Array, "r i"]
    stored: Bool[Array, "r i"]

    def seen(self, q: Float[Array, "r t h d"]) -> Float[Array, "r i h d"]:
        """Return a layer's queries of these tokens."""
        return jnp.take_along_axis(q, self.token[:, :, None, None], axis=1)

    def store(self, queries: Float[Array, "b l w h d"], seen: Float[Array, "r i l h d"]) -> Float[Array, "b l w h d"]:
        """Return the queries of every slot with those `seen` of every layer; the one at position p is at p mod w."""
        num_slots, _, window = queries.shape[:3]
        slot = jnp.arange(len(self.token)) if self.slot is None else self.slot
        row = jnp.where(self.stored, slot[:, None], num_slots)
        return queries.at[row, :, self.position % window].set(seen.astype(queries.dtype), mode="drop")


def of_chunk(chunk: Chunk, window: int) -> Watch:
    """Return the `Watch` of a chunk: the last `window` tokens of every slot, up to its end."""
    token = chunk.count[:, None] - 1 - jnp.arange(min(window, chunk.token.shape[1]), dtype=jnp.int32)
    stored = (token >= 0) & (chunk.start[:, None] + token >= chunk.end[:, None] - window)
    position = chunk.position[:, None] + token
    return Watch(slot=chunk.slot, token=jnp.maximum(token, 0), position=position, stored=stored)


def newest(
    queries: Float[Array, "ring h d"], length: Int[Array, ""], shift: Int[Array, ""], window: int
) -> tuple[Float[Array, "w h d"], Int[Array, " w"]]:
    """Return the last `window` queries of a slot and layer, and the place in the cache of each one's token.

    Their order is that of a ring of exactly `window`, so that sums over them do not depend on the ring's size.
    """
    at = places(length, shift, window)
    return queries[(at + shift) % len(queries)], at


def places(length: Int[Array, ""], shift: Int[Array, ""], window: int) -> Int[Array, " w"]:
    """Return the place in the cache of the token of each query in a ring of `window` queries.

    The slot has the keys of `length` tokens; compression dropped `shift` more.
    """
    newest = length - 1
    return newest - (newest - jnp.arange(window, dtype=jnp.int32)) % window - shift

"""The last queries of every sequence, by which a compression ranks what it keeps."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.decode.rows import Rows
from et_jax.models.transformer import Attend
from et_jax.types import pytree

Seen = tuple[Float[Array, "r i h d"], ...]
"""Queries of every layer so far, of the tokens that a `Watch` names."""


@pytree
class Watch:
    """The tokens of a forward pass whose queries are stored: `token[r, i]` of row r, which stands at `position[r, i]`.

    Those where `stored` is False are not. `slot` is that of every row, None where rows are the slots in order.
    """

    slot: Int[Array, " r"] | None
    token: Int[Array, "r i"]
    position: Int[Array, "r i"]
    stored: Bool[Array, "r i"]

    def attend(self, attend: Attend) -> Attend:
        """Return `attend` with a pair for its memory: its own, and the `Seen` of the layers so far."""

        def watching(layer: int, q: Array, k: Array, v: Array, memory: tuple) -> tuple[Array, tuple]:
            inner, seen = memory
            out, inner = attend(layer, q, k, v, inner)
            return out, (inner, (*seen, jnp.take_along_axis(q, self.token[:, :, None, None], axis=1)))

        return watching

    def store(self, queries: Float[Array, "b l w h d"], seen: Seen) -> Float[Array, "b l w h d"]:
        """Return the queries of every slot with those that were seen; the one at position p stands at p mod w."""
        num_slots, _, window = queries.shape[:3]
        slot = jnp.arange(len(self.token)) if self.slot is None else self.slot
        row = jnp.where(self.stored, slot[:, None], num_slots)
        new = jnp.stack(seen, axis=2).astype(queries.dtype)
        return queries.at[row, :, self.position % window].set(new, mode="drop")


def of_step(rows: Rows) -> Watch:
    """Return the watch on a step: the one token of every row that runs."""
    token = jnp.zeros((len(rows.token), 1), jnp.int32)
    return Watch(slot=rows.slot, token=token, position=rows.position[:, None], stored=rows.run[:, None])


def of_prefill(
    slot: Int[Array, " r"],
    start: Int[Array, " r"],
    count: Int[Array, " r"],
    end: Int[Array, " r"],
    window: int,
    length: int,
) -> Watch:
    """Return the watch on a prefill of chunks: the last `window` tokens of every slot, up to its `end`.

    A row holds `count` tokens of at most `length`, from position `start` on.
    """
    token = count[:, None] - 1 - jnp.arange(min(window, length), dtype=jnp.int32)
    position = start[:, None] + token
    stored = (token >= 0) & (position >= end[:, None] - window)
    return Watch(slot=slot, token=jnp.maximum(token, 0), position=position, stored=stored)


def places(length: Int[Array, ""], shift: Int[Array, ""], window: int) -> Int[Array, " w"]:
    """Return the place in the cache of the token whose query stands at each of `window` places of a slot's queries.

    The slot holds the keys of `length` tokens, of which compression left out `shift`.
    """
    newest = length - 1
    return newest - (newest - jnp.arange(window, dtype=jnp.int32)) % window - shift

"""The rows of a step: which slots advance, and the mapping from slots to rows and back."""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from et_jax.types import pytree

T = TypeVar("T")


@pytree
class Rows:
    """The rows of a step: for every row a slot, the token to be written, its position, and whether it runs.

    `slot` None means every slot in order: then nothing is gathered or scattered.
    `shift` counts the tokens that compression dropped from each row's cache, None without compression.
    """

    slot: Int[Array, " r"] | None
    token: Int[Array, " r"]
    position: Int[Array, " r"]
    run: Bool[Array, " r"]
    shift: Int[Array, " r"] | None = None

    @property
    def place(self) -> Int[Array, " r"]:
        """The place of each token in the cache of its slot."""
        return self.placed(self.position)

    def placed(self, position: Int[Array, " r"]) -> Int[Array, " r"]:
        """Return the place in the cache of the token at a position of each row's sequence."""
        return position if self.shift is None else position - self.shift

    def take(self, tree: T) -> T:
        """Return the rows' entries of a tree that leads with the slots."""
        return at_slots(self.slot, tree)

    def put(self, tree: T, rows: T) -> T:
        """Return a tree that leads with the slots, with the rows' entries replaced."""
        slot = self.slot
        return rows if slot is None else jax.tree.map(lambda old, new: old.at[slot].set(new), tree, rows)

    def put_where(self, keep: Bool[Array, " r"], tree: T, rows: T) -> T:
        """Return the same, but with the rows for which `keep` is False unchanged."""

        def kept(new: Array, old: Array) -> Array:
            return jnp.where(keep.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return self.put(tree, jax.tree.map(kept, rows, self.take(tree)))

    def spread(self, num_slots: int, rows: T) -> T:
        """Return a tree that leads with the slots: the rows' entries, and zeros for slots without a row."""
        return self.put(jax.tree.map(lambda x: jnp.zeros((num_slots, *x.shape[1:]), x.dtype), rows), rows)


def at_slots(slot: Int[Array, " r"] | None, tree: T) -> T:
    """Return the entries of these slots, all of them for None."""
    return tree if slot is None else jax.tree.map(lambda x: x[slot], tree)

"""A chunk: tokens that are written into the caches of their slots, and attend to them."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from et_jax.decode.rows import Rows
from et_jax.types import pytree


@pytree
class Places:
    """The page of every row's token, the same in all layers: computed before a loop over layers, which would repeat it.

    `wide` is the page table padded with the null page to the width of selectors. `last` is the page of the row's last
    token, `full` the same if that token fills it, else the null page.
    """

    wide: Int[Array, "r m"]
    last: Int[Array, " r"]
    full: Int[Array, " r"]


@pytree
class Chunk:
    """New tokens of slots: in every row the first `count` of `token`, the rest padding.

    The first is at `position` of its sequence and at `start` of the cache of its `slot`, whose pages are `table`;
    `slot` None means that rows are the slots in order. Rows of one slot are in order, and it has `end` tokens once
    all are written; a token attends up to itself. `at[i, j]` is the row of the j-th token of the i-th slot, or the
    slot's first row if there is none; None means that no two rows are read together.

    For a layer that shares its pages with others, `turn` is its index among them, `table` has page numbers
    of the shared pages, and `own_table` those of the layer. `seen` are the `lengths`, if computed before the layers.
    `places` are computed before them on a GPU.
    """

    slot: Int[Array, " r"] | None
    table: Int[Array, "r n"]
    token: Int[Array, "r t"]
    position: Int[Array, " r"]
    start: Int[Array, " r"]
    count: Int[Array, " r"]
    end: Int[Array, " r"]
    at: Int[Array, "s u"] | None = None
    own_table: Int[Array, "r n"] | None = None
    turn: Int[Array, ""] | None = None
    seen: Int[Array, " r"] | None = None
    places: "Places | None" = None

    @property
    def positions(self) -> Int[Array, "r t"]:
        """The position of every token."""
        return self.position[:, None] + jnp.arange(self.token.shape[1], dtype=jnp.int32)

    @property
    def lengths(self) -> Int[Array, " r"]:
        """The tokens that the last one of each row attends to, including itself; 0 for a row without tokens."""
        return jnp.where(self.count > 0, self.start + self.count, 0) if self.seen is None else self.seen


def of_rows(rows: Rows, table: Int[Array, "r n"], end: Int[Array, " r"], at: Int[Array, "s u"] | None = None) -> Chunk:
    """Return the chunk of one token per row of a step; fields as in `Chunk`."""
    return Chunk(
        slot=rows.slot,
        table=table,
        token=rows.token[:, None],
        position=rows.position,
        start=rows.place,
        count=rows.run.astype(jnp.int32),
        end=end,
        at=at,
    )

"""A chunk: tokens to be written into the caches of their slots, and read from there."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from et_jax.decode.rows import Rows
from et_jax.types import pytree


@pytree
class Places:
    """Where the token of every row lies, the same in all layers: a loop over layers works out anew what is in it.

    `wide` is the page table with the null page up to the width that selectors see. `last` is the page of the row's last
    token, `full` the same where that token fills it, else the null page.
    """

    wide: Int[Array, "r m"]
    last: Int[Array, " r"]
    full: Int[Array, " r"]


@pytree
class Chunk:
    """Tokens to follow what their slots hold: in every row the first `count` of `token`, the rest padding.

    The first stands at `position` of its text and at `start` of the cache of its `slot`, whose pages are `table`;
    `slot` None says that rows are the slots in order. Rows of one slot stand in order, and it holds `end` tokens once
    all are written; a token sees those up to itself. `at[i, j]` is the row of the j-th token of the i-th slot, where
    there is none its first row; None says that no two rows are read together.

    Of a layer that shares its pages with others, `turn` is its place among them, and what `table` numbers in the pages
    of all, `own_table` does in its own. `seen` are the `lengths`, where they were worked out before the layers.
    `places` are worked out before them on a GPU.
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
        """The tokens that the last one of each row sees, itself included; 0 where a row has none."""
        return jnp.where(self.count > 0, self.start + self.count, 0) if self.seen is None else self.seen


def of_rows(rows: Rows, table: Int[Array, "r n"], end: Int[Array, " r"], at: Int[Array, "s u"] | None = None) -> Chunk:
    """Return the chunk of one token that the rows of a step are; fields as those of `Chunk`."""
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

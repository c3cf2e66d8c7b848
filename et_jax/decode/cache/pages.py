"""The page table: which page stores which block, reference counts and free pages. Integers only.

Page 0 is the null page: it is the table entry of an unallocated block and is never allocated.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from et_jax.types import pytree, replace


@pytree
class PageTable:
    """Pages of every slot, and the pages that are free.

    `pages[b, n]` is the page of slot b's block n, 0 beyond `num_blocks[b]`. `references[p]` counts the
    holders of page p: slots, and the prefix cache. The first `num_free` entries of `free` are the
    free pages, allocated from the last on.
    """

    pages: Int[Array, "b n"]
    num_blocks: Int[Array, " b"]
    references: Int[Array, " p"]
    free: Int[Array, " p"]
    num_free: Int[Array, ""]


def empty(num_slots: int, num_blocks: int, num_pages: int) -> PageTable:
    """Return a table in which every page but the null page is free; page 1 is allocated first."""
    free = jnp.arange(num_pages - 1, -1, -1, dtype=jnp.int32)
    return PageTable(
        pages=jnp.zeros((num_slots, num_blocks), jnp.int32),
        num_blocks=jnp.zeros(num_slots, jnp.int32),
        references=jnp.zeros(num_pages, jnp.int32),
        free=free,
        num_free=jnp.asarray(num_pages - 1, jnp.int32),
    )


def reserve(table: PageTable, blocks: Int[Array, " b"], most: int) -> tuple[PageTable, Bool[Array, " b"]]:
    """Grow every slot to `blocks` blocks, by at most `most` each; False if pages ran out.

    Slots are processed in order. One that does not fit blocks the later ones that need pages, so
    that none overtakes it. A refused slot is unchanged.
    """
    need = jnp.clip(blocks - table.num_blocks, 0, most)
    end = jnp.cumsum(need)
    granted = (need == 0) | (end <= table.num_free)
    steps = jnp.arange(most)
    take = granted[:, None] & (steps < need[:, None])  # "b most"
    from_top = (end - need)[:, None] + steps
    page = table.free[jnp.where(take, table.num_free - 1 - from_top, 0)]
    block = jnp.where(take, table.num_blocks[:, None] + steps, table.pages.shape[1])
    rows = jnp.arange(need.shape[0])[:, None]
    return replace(
        table,
        pages=table.pages.at[rows, block].set(page, mode="drop"),
        num_blocks=table.num_blocks + jnp.where(granted, need, 0),
        references=table.references.at[jnp.where(take, page, table.references.shape[0])].add(1, mode="drop"),
        num_free=table.num_free - jnp.sum(jnp.where(granted, need, 0)),
    ), granted


def truncate(table: PageTable, surplus: Int[Array, " b"], most: int) -> PageTable:
    """Release the last `surplus` pages of every slot, at most `most`, which have no other holder."""
    steps = jnp.arange(most)
    rows = jnp.arange(surplus.shape[0])[:, None]
    given = steps < surplus[:, None]  # "b most"
    block = table.num_blocks[:, None] - 1 - steps
    page = table.pages[rows, jnp.maximum(block, 0)]
    emptied = replace(
        table,
        pages=table.pages.at[rows, jnp.where(given, block, table.pages.shape[1])].set(0, mode="drop"),
        num_blocks=table.num_blocks - jnp.sum(given, axis=1, dtype=jnp.int32),
    )
    return _freed(emptied, page.reshape(-1), given.reshape(-1))


def release(table: PageTable, slot: Int[Array, ""]) -> PageTable:
    """Release every page of `slot`; those without another holder become free."""
    emptied = replace(table, pages=table.pages.at[slot].set(0), num_blocks=table.num_blocks.at[slot].set(0))
    return decrement(emptied, table.pages[slot], table.num_blocks[slot])


def share(table: PageTable, slot: Int[Array, ""], pages: Int[Array, " n"], count: Int[Array, ""]) -> PageTable:
    """Add the first `count` of `pages`, which have other holders, to the empty `slot`."""
    shared = jnp.arange(pages.shape[0]) < count
    return replace(
        increment(table, pages, count),
        pages=table.pages.at[slot].set(jnp.where(shared, pages, 0)),
        num_blocks=table.num_blocks.at[slot].set(count),
    )


def increment(table: PageTable, pages: Int[Array, " m"], count: Int[Array, ""]) -> PageTable:
    """Add a holder to the first `count` of `pages`, which are in use and differ."""
    place = jnp.where(jnp.arange(pages.shape[0]) < count, pages, table.references.shape[0])
    return replace(table, references=table.references.at[place].add(1, mode="drop"))


def decrement(table: PageTable, pages: Int[Array, " m"], count: Int[Array, ""]) -> PageTable:
    """Remove a holder from the first `count` of `pages`, which differ; those without a holder become free."""
    return _freed(table, pages, jnp.arange(pages.shape[0]) < count)


def _freed(table: PageTable, pages: Int[Array, " m"], given: Bool[Array, " m"]) -> PageTable:
    """Return the table after removing a holder from the pages that are `given`."""
    num_pages = table.references.shape[0]
    references = table.references.at[jnp.where(given, pages, num_pages)].add(-1, mode="drop")
    freed = given & (references[pages] == 0)
    place = jnp.where(freed, table.num_free + jnp.cumsum(freed) - 1, num_pages)
    return replace(
        table,
        references=references,
        free=table.free.at[place].set(pages, mode="drop"),
        num_free=table.num_free + jnp.sum(freed, dtype=jnp.int32),
    )

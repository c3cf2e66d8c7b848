"""The origin of the arrays of a function of one row and KV head, and which of its outputs are permutations."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from et_jax.types import pytree, static


@pytree
class PerRow:
    """An array per row, the same for all heads. The function receives "*x"."""

    array: Shaped[Array, "b *x"]


@pytree
class PerHead:
    """An array per row and KV head. The function receives "*x"."""

    array: Shaped[Array, "b k *x"]


@pytree
class PerQuery:
    """An array per row and query head, by KV head. The function receives "g *x".

    If all rows share it, the array has one row, or one row per layer, and `layer` is the layer's number.
    """

    array: Shaped[Array, "b k g *x"]
    layer: Int[Array, "1"] | None = None


@pytree
class Pages:
    """Entries of a pool with one entry per KV head and page. The function receives "*i *x", those of its row.

    `columns` selects a half-open range of the last axis; None is
    all of it. For a pool shared equally by `depth` layers, `page` numbers the pages of the layer `turn`.
    """

    pool: Shaped[Array, "k p *x"]
    page: Int[Array, "b *i"]
    turn: Int[Array, "1"] | None = None
    depth: int = static(default=1)
    columns: tuple[int, int] | None = static(default=None)

    @property
    def width(self) -> int:
        """The size of the last axis that the function receives."""
        return self.pool.shape[-1] if self.columns is None else self.columns[1] - self.columns[0]


@pytree
class Listed:
    """Entries of a list per row and query head. The function receives "g n", those at the places of its head."""

    array: Shaped[Array, "b k g m"]
    place: Int[Array, "b k n"]


@pytree
class Placed:
    """A permuted output of the function: `array` with the place of each value, all places different."""

    array: Shaped[Array, "*b n"]
    place: Int[Array, "*b n"]


def in_order(x: Any) -> Any:
    """Return the values of a `Placed` output at their places, any other output as it is."""
    return jnp.zeros_like(x.array).at[x.place].set(x.array) if isinstance(x, Placed) else x


Input = PerRow | PerHead | PerQuery | Pages | Listed


def is_placed(x: Any) -> bool:
    """Return whether a node of a tree is a permuted output."""
    return isinstance(x, Placed)


def is_input(x: Any) -> bool:
    """Return whether a node of a tree is one of the input classes."""
    return isinstance(x, Input)


def sizes_of(leaves: Sequence[Input]) -> tuple[int, int, int]:
    """Return the numbers of rows, KV heads and query heads per KV head, 1 if no input has that axis."""
    batch = max(
        len(leaf.page if isinstance(leaf, Pages) else leaf.array)
        for leaf in leaves
        if not (isinstance(leaf, PerQuery) and leaf.layer is not None)
    )
    heads = next(
        leaf.pool.shape[0] if isinstance(leaf, Pages) else leaf.array.shape[1]
        for leaf in leaves
        if not isinstance(leaf, PerRow)
    )
    return batch, heads, next((leaf.array.shape[2] for leaf in leaves if isinstance(leaf, PerQuery)), 1)


def gathered(leaf: Input) -> Shaped[Array, "b ..."]:
    """Return the array of an input, with an axis of rows and, except for `PerRow`, one of heads in front."""
    if isinstance(leaf, Pages):
        return _of_pool(leaf)
    if isinstance(leaf, Listed):
        shape = (*leaf.array.shape[:3], leaf.place.shape[-1])
        return jnp.take_along_axis(leaf.array, jnp.broadcast_to(leaf.place[:, :, None], shape), axis=-1)
    if isinstance(leaf, PerQuery) and leaf.layer is not None:
        return leaf.array[leaf.layer]
    return leaf.array


def _of_pool(leaf: Pages) -> Shaped[Array, "b k *x"]:
    """Return the entries of all rows.

    Every axis of the pool but the last is indexed: a slice over heads or tokens makes XLA copy the pool into another
    layout on a TPU.
    """
    pool, columns = leaf.pool, slice(*leaf.columns or (None,))
    page = leaf.page if leaf.turn is None else leaf.page + leaf.turn[0] * (pool.shape[1] // leaf.depth)
    between = pool.shape[2:-1]
    page = page.reshape(len(page), 1, *page.shape[1:], *[1] * len(between))
    head = jnp.arange(pool.shape[0]).reshape(-1, *[1] * (page.ndim - 2))
    return pool[head, page, *jnp.ix_(*map(jnp.arange, between))][..., columns]

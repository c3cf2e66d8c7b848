"""`per_head`: run a function of one row and KV head for all of them, and say where each of its arrays comes from."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from et_jax.pallas.backend import platform
from et_jax.pallas.per_head.flat import MOST_NUMBERS
from et_jax.types import pytree, static


@pytree
class PerRow:
    """An array of every row, the same for all heads. The function receives "*x"."""

    array: Shaped[Array, "b *x"]


@pytree
class PerHead:
    """An array of every row and KV head. The function receives "*x"."""

    array: Shaped[Array, "b k *x"]


@pytree
class PerQuery:
    """An array of every row and query head, by KV head; of one row, where all have the same. It receives "g *x"."""

    array: Shaped[Array, "b k g *x"]


@pytree
class Pages:
    """Entries of a pool with an entry for each KV head and page. The function receives "*i *x", those of its row.

    `columns` says which of the last axis of the pool it receives, from the first of two to before the second; None is
    all of them.
    """

    pool: Shaped[Array, "k p *x"]
    page: Int[Array, "b *i"]
    columns: tuple[int, int] | None = static(default=None)

    @property
    def width(self) -> int:
        """The size of the last axis that the function receives."""
        return self.pool.shape[-1] if self.columns is None else self.columns[1] - self.columns[0]


@pytree
class Listed:
    """Entries of a list of every row and query head. The function receives "g n", those at the places of its head."""

    array: Shaped[Array, "b k g m"]
    place: Int[Array, "b k n"]


@pytree
class Placed:
    """An output of the function that is a permutation: `array` with each value at its place, all of them different."""

    array: Shaped[Array, "*b n"]
    place: Int[Array, "*b n"]


Input = PerRow | PerHead | PerQuery | Pages | Listed


def is_input(x: Any) -> bool:
    """Return whether a node of a tree is one of the arrays with their origin."""
    return isinstance(x, Input)


def per_head(function: Callable[..., Any], *inputs: Any, by_kernel: bool | None = None) -> Any:
    """Return the outputs of a function of one row and KV head, for every row and head: "b k" in front of each.

    inputs: trees whose leaves are `PerRow`, `PerHead`, `PerQuery`, `Pages` or `Listed`, one `PerQuery` at the least.
    by_kernel: whether GPU kernels run it (`per_head.gpu`), None where it is traced for a GPU; else `vmap` does.

    The function receives the same trees of arrays. It may return `Placed` arrays, which come back in their order. It
    must treat all query heads alike. Kernels repeat the last of them up to a power of two: for a function that adds up
    over another number of them there is none. It runs by `vmap`, with a warning that says so.
    """
    if platform() == "gpu" if by_kernel is None else by_kernel:
        from et_jax.pallas.per_head.gpu import by_kernels

        try:
            return by_kernels(function, inputs)
        except NotImplementedError as reason:
            warnings.warn(f"Blocks are chosen by XLA and not in one kernel: {reason}.", stacklevel=2)
    return by_vmap(function, inputs)


def by_vmap(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Return the outputs by `vmap` over rows and heads."""
    leaves, tree = jax.tree.flatten(inputs, is_leaf=is_input)
    batch, heads, _ = sizes_of(leaves)
    arrays = [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in map(gathered, leaves)]
    over_heads = [None if isinstance(leaf, PerRow) else 0 for leaf in leaves]

    def of_leaves(*arrays: Array) -> Any:
        return jax.tree.map(_in_order, function(*jax.tree.unflatten(tree, arrays)), is_leaf=_is_placed)

    return jax.vmap(jax.vmap(of_leaves, in_axes=over_heads, axis_size=heads))(*arrays)


def sizes_of(leaves: Sequence[Input]) -> tuple[int, int, int]:
    """Return how many rows, KV heads and query heads of each there are, of those 1 where no input has any."""
    batch = max(len(leaf.page if isinstance(leaf, Pages) else leaf.array) for leaf in leaves)
    heads = next(
        leaf.pool.shape[0] if isinstance(leaf, Pages) else leaf.array.shape[1]
        for leaf in leaves
        if not isinstance(leaf, PerRow)
    )
    return batch, heads, next((leaf.array.shape[2] for leaf in leaves if isinstance(leaf, PerQuery)), 1)


def fits(page_size: int, width: int) -> bool:
    """Return whether a kernel has registers for a page of tokens of this width, and sizes like theirs."""
    return all(size & (size - 1) == 0 for size in (page_size, width)) and page_size * width <= MOST_NUMBERS


def per_head_into(
    function: Callable[..., Any], pools: Any, page: Int[Array, " b"], *inputs: Any, interpret: bool = False
) -> Any:
    """Return pools "k p *x" with what a function of one row and KV head returns at the row's page, by a GPU kernel.

    The function returns a tree of arrays "*x", like that of the pools. Rows that are to write nothing have page 0, the
    null page, which may hold anything. Where two others have the same page, either is written.
    """
    from et_jax.pallas.per_head.gpu import into_pools

    return into_pools(function, pools, page, inputs, interpret)


def gathered(leaf: Input) -> Shaped[Array, "b ..."]:
    """Return the array that an input stands for, with an axis of rows and, but for `PerRow`, one of heads in front."""
    if isinstance(leaf, Pages):
        return _of_pool(leaf)
    if isinstance(leaf, Listed):
        shape = (*leaf.array.shape[:3], leaf.place.shape[-1])
        return jnp.take_along_axis(leaf.array, jnp.broadcast_to(leaf.place[:, :, None], shape), axis=-1)
    return leaf.array


def _of_pool(leaf: Pages) -> Shaped[Array, "b k *x"]:
    """The entries of all rows.

    Every axis of the pool from the third on but the last is indexed: a window over heads or tokens makes XLA lay pages
    out anew on a TPU.
    """
    pool, columns = leaf.pool, slice(*leaf.columns or (None,))
    if pool.ndim < 4:
        return pool[:, leaf.page].swapaxes(0, 1)[..., columns]
    between = pool.shape[2:-1]
    head = jnp.arange(pool.shape[0]).reshape(-1, *[1] * len(between))
    page = leaf.page.reshape(len(leaf.page), *[1] * (1 + len(between)))
    return pool[head, page, *jnp.ix_(*map(jnp.arange, between))][..., columns]


def _is_placed(x: Any) -> bool:
    return isinstance(x, Placed)


def _in_order(x: Any) -> Any:
    return jnp.zeros_like(x.array).at[x.place].set(x.array) if _is_placed(x) else x

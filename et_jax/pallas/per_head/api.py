"""`per_head`: run a function of one row and KV head for all of them, in one kernel on a GPU or a TPU."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from et_jax.pallas.backend import kernel, platform
from et_jax.pallas.per_head.flat import MOST_NUMBERS
from et_jax.pallas.per_head.inputs import PerRow, gathered, in_order, is_input, is_placed, sizes_of


def per_head(function: Callable[..., Any], *inputs: Any, chip: str | None = None) -> Any:
    """Return the outputs of a function of one row and KV head, for every row and head, with leading axes "b k".

    inputs: trees whose leaves are `PerRow`, `PerHead`, `PerQuery`, `Pages` or `Listed`, with at least one `PerQuery`.
    chip: whose kernels run it (`per_head.gpu`, `per_head.tpu`), None for that which it is traced for; else `vmap` does.

    The function receives the same trees of arrays. It may return `Placed` arrays, which are returned in order. It
    must treat all query heads alike. GPU kernels repeat the last query head up to a power of two, so a function that
    sums over another number of them has no kernel. It runs by `vmap`, with a warning.
    """
    chip = chip or platform()
    if chip in ("gpu", "tpu"):
        try:
            return kernel("per_head", chip, "by_kernels")(function, inputs)
        except NotImplementedError as reason:
            warnings.warn(f"A function of rows and KV heads runs by XLA and not in one kernel: {reason}.", stacklevel=2)
    return by_vmap(function, inputs)


def by_vmap(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Return the outputs by `vmap` over rows and heads."""
    leaves, tree = jax.tree.flatten(inputs, is_leaf=is_input)
    batch, heads, _ = sizes_of(leaves)
    arrays = [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in map(gathered, leaves)]
    over_heads = [None if isinstance(leaf, PerRow) else 0 for leaf in leaves]

    def of_leaves(*arrays: Array) -> Any:
        return jax.tree.map(in_order, function(*jax.tree.unflatten(tree, arrays)), is_leaf=is_placed)

    return jax.vmap(jax.vmap(of_leaves, in_axes=over_heads, axis_size=heads))(*arrays)


def fits(page_size: int, width: int) -> bool:
    """Return whether a page of tokens of this width fits in a kernel's registers, and both are powers of two."""
    return all(size & (size - 1) == 0 for size in (page_size, width)) and page_size * width <= MOST_NUMBERS


def per_head_into(
    function: Callable[..., Any],
    pools: Any,
    page: Int[Array, " b"],
    *inputs: Any,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    interpret: bool = False,
) -> Any:
    """Return pools "k p *x" in which a GPU kernel has stored the function's results at each row's page.

    The function returns a tree of arrays "*x", like that of the pools. Rows that store nothing have page 0, the
    null page, which may contain anything. If two rows have the same page, either is stored. `turn` and `depth` are
    as in `Pages`.
    """
    return kernel("per_head", "gpu", "into_pools")(function, pools, page, turn, depth, inputs, interpret)

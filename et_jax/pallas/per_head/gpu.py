"""`per_head` on a GPU: a Pallas kernel by Triton, one program for each row and KV head.

The function is traced for one row and head, and its operations are split into `stages`. Kernels run supported
operations on arrays that fit in registers, and on larger ones, such as one with a number for every block and channel,
that are summed in pieces (`pieces`).
"""

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.extend import core
from jaxtyping import Array, Int

from et_jax.pallas.per_head.flat import MOST_NUMBERS
from et_jax.pallas.per_head.inputs import Input, Listed, Pages, PerHead, PerQuery, PerRow, is_input, sizes_of
from et_jax.pallas.per_head.pieces import evaluated, is_large, variables
from et_jax.pallas.per_head.stages import run_stages
from et_jax.pallas.per_head.traced import power_of_two, traced_for, why_not

WARP_NUMBERS, MOST_WARPS = 512, 16  # numbers of the largest array per warp


def by_kernels(function: Callable[..., Any], inputs: tuple[Any, ...], interpret: bool = False) -> Any:
    """Return the outputs as `api.per_head` documents. `interpret` runs the kernels by XLA, for tests.

    Raises NotImplementedError if the function sums over query heads whose number is not a power of two.
    """
    leaves, tree = jax.tree.flatten(inputs, is_leaf=is_input)
    _, _, group = sizes_of(leaves)
    traced = traced_for(function, tree, leaves)
    by_query = {var for (var, _), axis in zip(traced.outputs, traced.axes, strict=True) if axis == 0}

    def by_kernel(eqns: list[Any], given: dict[Any, Input], exports: list[Any], places: list[Any]) -> dict[Any, Input]:
        return _by_kernel(eqns, given, exports, places, by_query, leaves, interpret)

    found = run_stages(traced, leaves, by_kernel)
    cut = [
        x if axis is None or x.shape[2 + axis] == group else jax.lax.slice_in_dim(x, 0, group, axis=2 + axis)
        for x, axis in zip(found, traced.axes, strict=True)
    ]
    return jax.tree.unflatten(traced.tree, cut)


def _by_kernel(
    eqns: list[Any],
    given: dict[Any, Input],
    exports: list[Any],
    places: list[Any],
    by_query: Container[Any],
    leaves: list[Input],
    interpret: bool,
) -> dict[Any, Input]:
    """Return the results of these operations by one kernel, a program per row and head; `Placed` ones are permuted.

    Exports that are `by_query` begin with an axis of query heads, and are stored without the repeated ones.
    """
    batch, heads, group = sizes_of(leaves)
    # booleans of a jaxpr are integers in memory
    dtypes = [jnp.int32 if var.aval.dtype == bool else var.aval.dtype for var in exports]

    def store(known: dict[Any, Array], row: Any, head: Any, refs: Sequence[Any]) -> None:
        for var, place, ref in zip(exports, places, refs, strict=True):
            index = _index(var.aval.shape) if place is None else (known[place],)
            mask = index[0] < group if var in by_query and var.aval.shape[0] > group else None
            plt.store(ref.at[(row, head, *index)], known[var].astype(ref.dtype), mask=mask)

    shapes = [(group, *var.aval.shape[1:]) if var in by_query else var.aval.shape for var in exports]
    shapes = [jax.ShapeDtypeStruct((batch, heads, *x), dtype) for x, dtype in zip(shapes, dtypes, strict=True)]
    made = _launched(eqns, given, store, (batch, heads), shapes, interpret)
    made = [array != 0 if var.aval.dtype == bool else array for var, array in zip(exports, made, strict=True)]
    return {
        var: PerQuery(array=array) if var in by_query else PerHead(array=array)
        for var, array in zip(exports, made, strict=True)
    }


def into_pools(
    function: Callable[..., Any],
    pools: Any,
    page: Int[Array, " b"],
    turn: Int[Array, "1"] | None,
    depth: int,
    inputs: tuple[Any, ...],
    interpret: bool,
) -> Any:
    """Return the pools as `api.per_head_into` documents. Raises NotImplementedError if one kernel does not suffice."""
    leaves, tree = jax.tree.flatten(inputs, is_leaf=is_input)
    traced = traced_for(function, tree, leaves)
    refused = [eqn.primitive.name for eqn in traced.jaxpr.eqns if why_not(eqn) is not None]
    if refused:
        raise NotImplementedError(f"a kernel that stores to pages has no {refused[0]}, or not of this size")
    arrays, of_pools = jax.tree.flatten(pools)
    at = [page] if turn is None else [page, turn]
    outputs: list[Any] = [var for var, _ in traced.outputs]

    def store(known: dict[Any, Array], row: Any, head: Any, refs: Sequence[Any]) -> None:
        at = refs[0][row] + _first_page(refs[-1], None if turn is None else refs[1], depth)
        for var, ref in zip(outputs, refs[-len(arrays) :], strict=True):
            value = var.val if isinstance(var, core.Literal) else known[var]
            ref[(head, at, *_index(value.shape))] = value.astype(ref.dtype)

    given = dict(zip(traced.jaxpr.invars, leaves, strict=True))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    made = _launched(traced.jaxpr.eqns, given, store, sizes_of(leaves)[:2], shapes, interpret, at, arrays)
    return jax.tree.unflatten(of_pools, made)


def _launched(
    eqns: list[Any],
    given: dict[Any, Input],
    store: Callable[..., None],
    grid: tuple[int, int],
    out_shapes: list[jax.ShapeDtypeStruct],
    interpret: bool,
    more: Sequence[Array] = (),
    pools: Sequence[Array] = (),
) -> list[Array]:
    """Launch one kernel of these operations; `store` receives references to `more`, to the `pools` and to the outputs.

    Outputs alias `pools`.
    """
    arrays, tree = jax.tree.flatten(list(given.values()))

    def run(*refs: Any) -> None:
        row, head = pl.program_id(0), pl.program_id(1)
        inputs = dict(zip(given, jax.tree.unflatten(tree, refs[: len(arrays)]), strict=True))
        known = {var: _load(leaf, (row, head), var.aval.shape) for var, leaf in inputs.items() if not is_large(var)}

        def load(var: Any, axis: int, first: Any, size: int) -> Array:
            shape = var.aval.shape
            return _load(inputs[var], (row, head), (*shape[:axis], size, *shape[axis + 1 :]), axis, first)

        store(evaluated(eqns, known, load), row, head, refs[len(arrays) :])

    sizes = (math.prod(var.aval.shape) for eqn in eqns for var in (*variables(eqn), *eqn.outvars))
    largest = min(max(sizes), MOST_NUMBERS)
    warps = min(max(power_of_two(largest // WARP_NUMBERS + 1) // 2, 4), MOST_WARPS)
    settings: dict[str, Any] = {} if interpret else {"compiler_params": plt.CompilerParams(num_warps=warps)}
    first = len(arrays) + len(more)
    settings["input_output_aliases"] = {first + i: i for i in range(len(pools))}
    kernel = pl.pallas_call(run, grid=grid, out_shape=out_shapes, interpret=interpret, name="per_head", **settings)
    return list(kernel(*arrays, *more, *pools))


def _load(leaf: Any, at: tuple[Any, Any], shape: tuple[int, ...], axis: int = 0, first: Any = 0) -> Array:
    """Return an input, whose arrays are references, for one row and head, from the place `first` of an axis on."""
    row, head = at
    index = _index(shape, axis, first)
    match leaf:
        case Pages(pool=pool, page=page, turn=turn):
            entry = page.ndim - 1
            pages = page[(row, *_index(shape[:entry], axis, first))] + _first_page(pool, turn, leaf.depth)
            pages = jax.lax.broadcast_in_dim(pages, shape, range(entry))
            *within, last = index[entry:] if len(shape) > entry else (None,)
            return pool[(head, pages, *within, *([] if last is None else [last + (leaf.columns or (0,))[0]]))]
        case Listed(array=array, place=place):
            places = jax.lax.broadcast_in_dim(place[(row, head, *_index(shape[1:], axis - 1, first))], shape, [1])
            return array[(row, head, jnp.minimum(index[0], array.shape[2] - 1), places)]
        case PerQuery(array=array, layer=layer):
            if layer is not None:
                row = layer[0]
            elif array.shape[0] == 1:
                row = 0
            return array[(row, head, jnp.minimum(index[0], array.shape[2] - 1), *index[1:])]
        case PerHead(array=array):
            return array[(row, head, *index)]
        case PerRow(array=array):
            return array[(row, *index)]
    raise TypeError(leaf)


def _first_page(pool: Any, turn: Any, depth: int) -> Any:
    """Return the first page of a layer in a pool that `depth` layers share. Both are references."""
    return 0 if turn is None else turn[0] * (pool.shape[1] // depth)


def _index(shape: tuple[int, ...], axis: int = 0, first: Any = 0) -> tuple[Int[Array, "..."], ...]:
    """Return the index of every entry of an array, from the place `first` of an axis on."""
    places = (jax.lax.broadcasted_iota(jnp.int32, shape, each) for each in range(len(shape)))
    return tuple(place + first if each == axis else place for each, place in enumerate(places))

"""The operations of a function of one row and KV head as stages: XLA and kernels alternate, each running all it can.

Kernels run the operations that they support, and XLA the rest, such as sorts, for all rows and heads. If kernels run
before and after XLA, the second recomputes the results of the first instead of reading them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from et_jax.pallas.per_head.inputs import Input, Listed, PerHead, PerQuery, PerRow, gathered, sizes_of
from et_jax.pallas.per_head.pieces import results, variables
from et_jax.pallas.per_head.traced import OVER_ALL, Function, needed

OVER_BLOCKS = (*OVER_ALL, "reduce_max", "reduce_min", "while")  # operations that XLA does not fuse with later ones

ByKernel = Callable[[list[Any], dict[Any, Input], list[Any], list[Any]], dict[Any, Input]]
"""Returns the results of operations by one kernel: of the variables to export, each permuted by its places if any."""


def run_stages(traced: Function, leaves: list[Input], by_kernel: ByKernel, few: int = 0) -> list[Array]:
    """Return the outputs for all rows and heads. Of at most `few` operations no kernel is made: XLA runs them."""
    eqns = traced.eqns
    maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    kernel = [reason is None for reason in traced.reasons]
    waited: list[bool] = []  # per operation: a kernel runs it, and XLA reads its result instead of recomputing it
    turn: list[int] = []
    for i, eqn in enumerate(eqns):
        before = [maker[var] for var in variables(eqn) if var in maker]
        waited.append(kernel[i] and (eqn.primitive.name in OVER_BLOCKS or any(waited[j] for j in before)))
        turn.append(max((turn[j] + (waited[j] and not kernel[i]) for j in before), default=0))

    loaded: dict[Any, Input] = dict(zip(traced.jaxpr.invars, leaves, strict=True))  # what a kernel may load
    stored: dict[Any, Input] = {}  # by a kernel, for XLA: another kernel recomputes it
    places = {var: place for var, place in traced.outputs if place is not None}
    end = {}  # the stage of every output, by which its places are known
    for var, place in traced.outputs:
        end[var] = max((turn[maker[one]] for one in (var, place) if one in maker), default=0)
    for now in range(max(turn, default=0) + 1):
        for in_kernel in (False, True):
            wanted = {var for i, eqn in enumerate(eqns) if not (kernel[i] and in_kernel) for var in variables(eqn)}
            exports = [
                var
                for var, i in maker.items()
                if kernel[i] == in_kernel
                and (end[var] == now if var in end else turn[i] == now and var in wanted and waited[i] == in_kernel)
            ]
            if not exports:
                continue
            if in_kernel:
                at = [places.get(var) for var in exports]
                part, begin = needed(eqns, [*exports, *filter(None, at)], loaded)
                if len(part) > few:
                    stored |= by_kernel(part, {var: loaded[var] for var in begin}, exports, at)
                    continue
                stored |= _by_xla(part, {var: loaded[var] for var in begin}, exports, leaves)
            else:
                part, begin = needed(eqns, exports, loaded | stored)
                loaded |= _by_xla(part, {var: (loaded | stored)[var] for var in begin}, exports, leaves)
    found = loaded | stored
    return [gathered(found[var]) for var, _ in traced.outputs]


def _evaluated(eqns: list[Any], known: dict[Any, Any]) -> dict[Any, Any]:
    """Return the values of all variables after these operations."""
    known = dict(known)
    for eqn in eqns:
        known |= results(eqn, known)
    return known


def _by_xla(eqns: list[Any], given: dict[Any, Input], exports: list[Any], leaves: list[Input]) -> dict[Any, Input]:
    """Return the results of these operations by XLA for all rows and heads."""
    batch, heads, _ = sizes_of(leaves)
    over_heads = [None if isinstance(leaf, PerRow) else 0 for leaf in given.values()]

    def of_one(*arrays: Array) -> list[Array]:
        known = _evaluated(eqns, dict(zip(given, arrays, strict=True)))
        return [known[var] for var in exports]

    of_row = jax.vmap(of_one, in_axes=over_heads, axis_size=heads)
    arrays = [_padded(gathered(leaf), var, leaf) for var, leaf in given.items()]
    arrays = [jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in arrays]
    made = jax.vmap(of_row, axis_size=batch)(*arrays)
    return {var: PerHead(array=array) for var, array in zip(exports, made, strict=True)}


def _padded(array: Array, var: Any, leaf: Input) -> Array:
    """Return an array with its last query head repeated up to the number that the function is traced for."""
    if not isinstance(leaf, PerQuery | Listed):
        return array
    widths = [(0, 0)] * array.ndim
    widths[2] = (0, var.aval.shape[0] - array.shape[2])
    return jnp.pad(array, widths, mode="edge")

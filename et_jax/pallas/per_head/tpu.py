"""`per_head` on a TPU: Pallas kernels that run the operations of a function for many rows and heads at once.

The function is traced for one row and head, and its operations are split into `stages`. A kernel runs those that
`lifted` supports: on numbers, lists of blocks and one such list for each query head. XLA gathers pages and runs the
rest, such as sums over the tokens of a page.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from et_jax.pallas.checks import SUBLANES
from et_jax.pallas.per_head import lifted
from et_jax.pallas.per_head.flat import TPU
from et_jax.pallas.per_head.inputs import Input, PerHead, PerRow, Placed, gathered, in_order, is_input, sizes_of
from et_jax.pallas.per_head.stages import run_stages
from et_jax.pallas.per_head.traced import traced_for

NUMBERS = 2**15  # of the largest array of a kernel: 32 registers
FEW = 8  # operations that are no reason for a kernel


def by_kernels(function: Callable[..., Any], inputs: tuple[Any, ...], interpret: bool = False) -> Any:
    """Return the outputs as `api.per_head` documents. `interpret` runs the kernels by XLA, for tests."""
    leaves, tree = jax.tree.flatten(inputs, is_leaf=is_input)
    traced = traced_for(function, tree, leaves, TPU)
    places = [place for _, place in traced.outputs if place is not None]
    plain = dataclasses.replace(
        traced, outputs=tuple((var, None) for var in (*(x for x, _ in traced.outputs), *places))
    )

    def by_kernel(eqns: list[Any], given: dict[Any, Input], exports: list[Any], _: list[Any]) -> dict[Any, Input]:
        return _by_kernel(eqns, given, exports, sizes_of(leaves), interpret)

    found = run_stages(plain, leaves, by_kernel, FEW)
    values, place = found[: len(traced.outputs)], iter(found[len(traced.outputs) :])
    ordered = jax.vmap(jax.vmap(in_order))
    values = [
        x if at is None else ordered(Placed(array=x, place=next(place)))
        for x, (_, at) in zip(values, traced.outputs, strict=True)
    ]
    return jax.tree.unflatten(traced.tree, values)


def _by_kernel(
    eqns: list[Any], given: dict[Any, Input], exports: list[Any], sizes: tuple[int, int, int], interpret: bool
) -> dict[Any, Input]:
    """Return the results of these operations by one kernel, whose programs take some rows and heads each.

    `sizes` are the numbers of rows, KV heads and query heads of each.
    """
    of, r = sizes[:2], math.prod(sizes[:2])
    largest = max(math.prod(var.aval.shape) for eqn in eqns for var in (*eqn.invars, *eqn.outvars))
    most = max(NUMBERS // max(largest, 1) // SUBLANES, 1) * SUBLANES
    part = min(r + -r % SUBLANES, most)
    padded = -(-r // part) * part
    rows = lifted.Rows(part, sizes[2])
    scalars = [var for var in given if not var.aval.shape]
    arrays = {var: leaf for var, leaf in given.items() if var.aval.shape}

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec((part, *shape), lambda i: (i, *[0] * len(shape)))

    def run(*refs: Any) -> None:
        known = {var: _load(ref, var.aval, rows) for var, ref in zip(arrays, refs, strict=False)}
        if scalars:
            packed = refs[len(arrays)][...]
            known |= {var: _number(packed, i, var.aval.dtype) for i, var in enumerate(scalars)}
        known = rows.evaluated(eqns, known)
        for var, ref in zip(exports, refs[len(refs) - len(exports) :], strict=True):
            _store(ref, rows.full(known[var], var.aval), var.aval, rows)

    operands = [_of_rows(gathered(leaf), leaf, var.aval, of, padded) for var, leaf in arrays.items()]
    if scalars:
        operands.append(_of_rows(*_packed([given[var] for var in scalars]), of, padded))
    dtypes = [jnp.int32 if var.aval.dtype == bool else var.aval.dtype for var in exports]
    shapes = [var.aval.shape or (1,) for var in exports]
    made = pl.pallas_call(
        run,
        grid=(padded // part,),
        in_specs=[spec(x.shape[1:]) for x in operands],
        out_specs=[spec(shape) for shape in shapes],
        out_shape=[jax.ShapeDtypeStruct((padded, *x), dtype) for x, dtype in zip(shapes, dtypes, strict=True)],
        interpret=interpret,
        name="per_head",
        **({} if interpret else {"compiler_params": pltpu.CompilerParams(dimension_semantics=("parallel",))}),
    )(*operands)
    return {var: PerHead(array=_by_head(array, var.aval, of)) for var, array in zip(exports, made, strict=True)}


def _packed(leaves: list[Input]) -> tuple[Array, Input, Any]:
    """Return numbers of rows, and of heads, side by side as bits: an array, the input it would be and its shape."""
    found = [gathered(leaf) for leaf in leaves]
    found = [lax.bitcast_convert_type(x, jnp.int32) if x.dtype.itemsize == 4 else x.astype(jnp.int32) for x in found]
    if any(x.ndim > 1 for x in found):
        heads = max(x.shape[1] for x in found if x.ndim > 1)
        found = [jnp.broadcast_to(x if x.ndim > 1 else x[:, None], (len(x), heads)) for x in found]
    batch = max(map(len, found))
    array = jnp.stack([jnp.broadcast_to(x, (batch, *x.shape[1:])) for x in found], axis=-1)
    leaf = PerRow(array=array) if array.ndim == 2 else PerHead(array=array)
    return array, leaf, jax.ShapeDtypeStruct(array.shape[-1:], jnp.int32)


def _number(packed: Array, i: int, dtype: Any) -> Array:
    """Return the i-th of numbers that are packed as bits, "r 1"."""
    at = lax.broadcasted_iota(jnp.int32, packed.shape, 1)
    found = jnp.sum(jnp.where(at == i, packed, 0), axis=1, keepdims=True)
    return found != 0 if dtype.name == "bool" else lax.bitcast_convert_type(found, dtype)


def _of_rows(array: Array, leaf: Input, aval: Any, of: tuple[int, int], padded: int) -> Array:
    """Return an input of the kernel, "r *x", its last row repeated."""
    shape = aval.shape
    array = array[:, None] if isinstance(leaf, PerRow) else array
    array = jnp.broadcast_to(array, (*of, *shape)).reshape(-1, *shape)
    array = array.astype(jnp.int32) if array.dtype == bool else array
    return jnp.pad(array, ((0, padded - len(array)), *[(0, 0)] * len(shape)), mode="edge")


def _by_head(array: Array, aval: Any, of: tuple[int, int]) -> Array:
    """Return an output of the kernel, "b k *x"."""
    array = array[: math.prod(of)].reshape(*of, *aval.shape)
    return array != 0 if aval.dtype == bool else array


def _load(ref: Any, aval: Any, rows: lifted.Rows) -> Array:
    """Return an input as `lifted` has it."""
    *leading, _ = aval.shape
    if leading:
        parts = [ref[(slice(None), *at)] for at in np.ndindex(*leading)]
        found = jnp.stack(parts).reshape(*leading, *parts[0].shape)
    else:
        found = rows.normal(ref[...], aval.shape)
    return found != 0 if aval.dtype == bool else found


def _store(ref: Any, value: Array, aval: Any, rows: lifted.Rows) -> None:
    value = value.astype(ref.dtype)
    leading = aval.shape[:-1]
    if rows.is_short(aval.shape):
        ref[...] = rows.on_lanes(value, aval.shape)
    elif not leading:
        ref[...] = value
    for at in np.ndindex(*leading) if leading else ():
        ref[(slice(None), *at)] = value[at]

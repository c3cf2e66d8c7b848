"""Arrays larger than the registers, which a kernel sums in pieces.

Such an array never exists entirely: a loop computes each of its pieces from pieces of the operands.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, Int, Shaped

from et_jax.pallas.per_head.flat import IN_KERNELS, MOST_NUMBERS

# Operations that are not elementwise.
_SHAPED = """
    argmax argmin broadcast_in_dim cumsum iota reduce_max reduce_min reduce_sum reshape squeeze transpose while
"""
NUMBER_BY_NUMBER = IN_KERNELS - frozenset(_SHAPED.split())

Load = Callable[[Any, int, Int[Array, ""], int], Array]
"""Loads a piece of a kernel's input: the variable, an axis, its first index there, and its length."""


def is_large(var: Any) -> bool:
    """Return whether a variable does not fit in registers."""
    return math.prod(var.aval.shape) > MOST_NUMBERS


def variables(eqn: Any) -> list[Any]:
    """Return the inputs of an operation that are not literals."""
    return [atom for atom in eqn.invars if not isinstance(atom, core.Literal)]


def in_pieces(eqns: list[Any], outputs: Iterable[Any]) -> set[int]:
    """Return the indices of the operations that a kernel can run on pieces: sums, and the large arrays they sum."""
    outputs, found = set(outputs), {i for i, eqn in enumerate(eqns) if _adds_up(eqn) or _makes_piece(eqn)}
    users: dict[Any, set[int]] = {}
    for i, eqn in enumerate(eqns):
        for var in variables(eqn):
            users.setdefault(var, set()).add(i)
    for i in sorted(found, reverse=True):
        made = eqns[i].outvars[0]
        if is_large(made) and (made in outputs or not users.get(made, set()) <= found):
            found.remove(i)
    return found


def _makes_piece(eqn: Any) -> bool:
    """Return whether an operation makes a large array piecewise from pieces of its operands."""
    return is_large(eqn.outvars[0]) and eqn.primitive.name in (*NUMBER_BY_NUMBER, "broadcast_in_dim")


def _adds_up(eqn: Any) -> bool:
    """Return whether an operation is a sum over a large array, or a product of matrices that sums one."""
    summed, axis = _summed(eqn)
    by_one = math.prod(summed) // summed[axis] if summed else MOST_NUMBERS + 1
    return by_one <= MOST_NUMBERS < math.prod(summed) and not is_large(eqn.outvars[0])


def _summed(eqn: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape that an operation sums, and the axis of its pieces; no shape if it is not a sum."""
    if eqn.primitive.name == "reduce_sum":
        shape = eqn.invars[0].aval.shape
        return shape, max(range(len(shape)), key=shape.__getitem__, default=0)
    if eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"] == (((1,), (0,)), ((), ())):
        x, y = (atom.aval.shape for atom in eqn.invars)
        if len(x) == len(y) == 2:
            return (x[0], *y), 1
    return (), 0


def evaluated(eqns: list[Any], known: dict[Any, Array], load: Load) -> dict[Any, Array]:
    """Return the values of all variables that fit in registers, after these operations. `load` loads large inputs."""
    known, makers = dict(known), {}

    def piece(atom: Any, axis: int, i: Int[Array, ""], m: int) -> Array:
        """Return the i-th piece of m entries along an axis, or the array if its size there is 1."""
        if isinstance(atom, core.Literal):
            return atom.val
        shape = atom.aval.shape
        if atom in known:
            return known[atom] if not shape or shape[axis] == 1 else _cut(known[atom], axis, i, m)
        if atom not in makers:
            return load(atom, axis, i * m, m)
        eqn = makers[atom]
        if eqn.primitive.name != "broadcast_in_dim":
            return eqn.primitive.bind(*(piece(each, axis, i, m) for each in eqn.invars), **eqn.params)
        dims, [operand] = eqn.params["broadcast_dimensions"], eqn.invars
        if axis in dims:
            value = piece(operand, dims.index(axis), i, m)
        else:
            value = operand.val if isinstance(operand, core.Literal) else known[operand]
        size = 1 if shape[axis] == 1 else m
        return lax.broadcast_in_dim(value, (*shape[:axis], size, *shape[axis + 1 :]), dims)

    def added_up(eqn: Any) -> Array:
        shape, axis = _summed(eqn)
        n, result = shape[axis], eqn.outvars[0].aval
        m = min(n, MOST_NUMBERS // (math.prod(shape) // n))
        if eqn.primitive.name == "dot_general":

            def add(i: Int[Array, ""], sofar: Array) -> Array:
                x, y = piece(eqn.invars[0], 1, i, m), piece(eqn.invars[1], 0, i, m)
                return sofar + jnp.sum(x[:, :, None].astype(result.dtype) * y[None].astype(result.dtype), axis=1)

            return lax.fori_loop(0, n // m, add, jnp.zeros(result.shape, result.dtype))
        axes = eqn.params["axes"]
        if axis in axes:
            return lax.fori_loop(
                0,
                n // m,
                lambda i, sofar: sofar + jnp.sum(piece(eqn.invars[0], axis, i, m), axis=axes),
                jnp.zeros(result.shape, result.dtype),
            )
        at = axis - sum(each < axis for each in axes)
        split = (*result.shape[:at], n // m, m, *result.shape[at + 1 :])

        def put(i: Int[Array, ""], sofar: Array) -> Array:
            found = jnp.sum(piece(eqn.invars[0], axis, i, m), axis=axes)
            found = jnp.broadcast_to(jnp.expand_dims(found, at), split)
            return jnp.where(lax.broadcasted_iota(jnp.int32, split, at) == i, found, sofar)

        return lax.fori_loop(0, n // m, put, jnp.zeros(split, result.dtype)).reshape(result.shape)

    for eqn in eqns:
        if _makes_piece(eqn):
            makers[eqn.outvars[0]] = eqn
        elif _adds_up(eqn):
            known[eqn.outvars[0]] = added_up(eqn)
        else:
            known |= results(eqn, known)
    return known


def results(eqn: Any, known: dict[Any, Array]) -> dict[Any, Array]:
    """Return the values of the variables that an operation defines."""
    values = [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in eqn.invars]
    found = eqn.primitive.bind(*values, **eqn.params)
    return dict(zip(eqn.outvars, found if eqn.primitive.multiple_results else [found], strict=True))


def _cut(x: Shaped[Array, "..."], axis: int, i: Int[Array, ""], m: int) -> Shaped[Array, "..."]:
    """Return the i-th piece of an array in registers, where kernels cannot slice."""
    if x.dtype == bool:
        return _cut(x.astype(jnp.int32), axis, i, m) != 0
    split = x.reshape(*x.shape[:axis], -1, m, *x.shape[axis + 1 :])
    here = lax.broadcasted_iota(jnp.int32, split.shape, axis) == i
    return jnp.sum(jnp.where(here, split, jnp.zeros((), x.dtype)), axis=axis, dtype=x.dtype)

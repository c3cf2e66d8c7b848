"""The operations of a function of one row and KV head, run for r of them at once in the registers of a TPU.

Rows and heads lie on the sublanes: an array "*x n" of the function becomes "*x r n", and a number "r 1". An array of
one number, or of as many as there are query heads, is short: it becomes "g r 1", and so meets "g n" without a move of
lanes. A number that is known when the kernel is traced stays a number.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core
from jaxtyping import Array

MOST_LISTS = 64
BY_SIZE = "TPU kernels support 32-bit numbers, one for each block or query head, or for each of both"
_DTYPES = ("bool", "int32", "uint32", "float32")
_OPERATIONS = """
    abs add and bitcast_convert_type ceil clamp convert_element_type cos div eq exp exp2 floor ge gt integer_pow
    is_finite le log log1p logistic lt max min mul ne neg not or population_count pow rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sqrt square sub tanh xor
"""
_ELEMENTWISE = frozenset(_OPERATIONS.split())
Shape = tuple[int, ...]


def why_not(eqn: Any, group: int) -> str | None:
    """Return why an operation does not run in a TPU kernel, with `group` query heads, None if it does."""
    rows = Rows(8, group)
    values = [atom.val if isinstance(atom, core.Literal) else None for atom in eqn.invars]
    given = [atom.aval for atom, value in zip(eqn.invars, values, strict=True) if value is None]

    def run(*arrays: Array) -> list[Any]:
        left = iter(arrays)
        return rows.operation(eqn, [next(left) if value is None else value for value in values])

    try:
        jax.eval_shape(run, *(jax.ShapeDtypeStruct(rows.lifted(aval.shape), aval.dtype) for aval in given))
    except NotImplementedError as reason:
        return str(reason)
    return None


def _as_integers(move: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function that moves booleans and unsigned numbers as integers: Mosaic moves no others."""

    @functools.wraps(move)
    def moved(x: Array, *where: Any) -> Array:
        if x.dtype == bool:
            return move(x.astype(jnp.int32), *where) != 0
        if x.dtype == jnp.uint32:
            return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.int32), *where), jnp.uint32)
        return move(x, *where)

    return moved


@_as_integers
def _broadcast(x: Array, shape: Shape) -> Array:
    return jnp.broadcast_to(x, shape)


@_as_integers
def _led(x: Array, leading: Shape) -> Array:
    """Return an array with other leading axes, of as many numbers."""
    return x.reshape(*leading, *x.shape[-2:])


@_as_integers
def _from_short(x: Array) -> Array:
    """Return "r g" of "g r 1"."""
    size, r, _ = x.shape
    at = lax.broadcasted_iota(jnp.int32, (r, size), 1)
    found = jnp.broadcast_to(x[0], (r, size))
    for i in range(1, size):
        found = jnp.where(at == i, jnp.broadcast_to(x[i], (r, size)), found)
    return found


@_as_integers
def _to_short(x: Array) -> Array:
    """Return "g r 1" of "r g"."""
    at = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    zero = jnp.zeros((), x.dtype)
    return jnp.stack([jnp.sum(jnp.where(at == i, x, zero), axis=1, keepdims=True) for i in range(x.shape[1])])


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows and heads that are evaluated at once, of so many query heads each."""

    r: int
    group: int

    def evaluated(self, eqns: Sequence[Any], known: dict[Any, Any]) -> dict[Any, Any]:
        """Return the values of all variables after these operations."""
        known = dict(known)
        for eqn in eqns:
            values = [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in eqn.invars]
            known.update(zip(eqn.outvars, self.operation(eqn, values), strict=True))
        return known

    def operation(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Return the results of an operation. Raises NotImplementedError if TPU kernels lack it."""
        name, params, result = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
        for var in (*eqn.invars, *eqn.outvars):
            if var.aval.dtype.name not in _DTYPES or math.prod(var.aval.shape[:-1]) > MOST_LISTS:
                raise NotImplementedError(BY_SIZE)
        shapes, shape = [atom.aval.shape for atom in eqn.invars], result.shape
        if name == "while":
            return self._loop(eqn, values)
        if values and not shape and not any(isinstance(value, Tracer) for value in values):
            with jax.ensure_compile_time_eval():
                return [np.asarray(eqn.primitive.bind(*values, **params))]
        match name:
            case "iota":
                on_lanes = params["dimension"] == len(shape) - 1 and not self.is_short(shape)
                return [lax.broadcasted_iota(params["dtype"], self.lifted(shape), params["dimension"] + on_lanes)]
            case "broadcast_in_dim":
                return [self._broadcast_in_dim(values[0], shapes[0], shape, params["broadcast_dimensions"])]
            case "reshape" | "squeeze":
                return [self._reshaped(values[0], shapes[0], shape)]
            case "reduce_sum" | "reduce_max" | "reduce_min":
                return [self._reduced(name, self.full(values[0], eqn.invars[0].aval), shapes[0], shape, params["axes"])]
            case "dot_general":
                return [self._product(params, values, shapes, shape)]
            case "slice" | "pad":
                return [self._cut_or_padded(name, params, values, shapes[0], shape)]
            case "cumsum":
                return [self._cumulated(values[0], shapes[0], params)]
        if name in ("div", "rem", "sign") and not jnp.issubdtype(result.dtype, jnp.floating):
            return [_of_integers(name, *values)]
        if name in _ELEMENTWISE:
            return [self._elementwise(eqn, values, shape)]
        raise NotImplementedError("kernels have no such operation")

    def full(self, value: Any, aval: Any) -> Array:
        """Return a value for every row and head, also one that is the same for all."""
        return _broadcast(jnp.asarray(value, aval.dtype), self.lifted(aval.shape))

    def is_short(self, shape: Shape) -> bool:
        """Return whether an array "g" becomes "g r 1"."""
        return len(shape) == 1 and shape[0] in (1, self.group)

    def lifted(self, shape: Shape) -> Shape:
        """Return the shape of an array for all rows and heads."""
        if self.is_short(shape):
            return (*shape, self.r, 1)
        return (*shape[:-1], self.r, *(shape[-1:] or (1,)))

    def on_lanes(self, x: Array, shape: Shape) -> Array:
        """Return an array of this shape as "*x r n", also a short one."""
        return _from_short(x) if self.is_short(shape) else x

    def normal(self, x: Array, shape: Shape) -> Array:
        """Return an array "*x r n" of this shape, a short one as "g r 1"."""
        return _to_short(x) if self.is_short(shape) else x

    def _off_lanes(self, x: Array, shape: Shape) -> Array:
        """Return "*x r 1" of an array that is short, or whose last axis has one number."""
        if self.is_short(shape):
            return x
        if shape[-1] != 1:
            raise NotImplementedError(BY_SIZE)
        return _led(x, shape)

    def _elementwise(self, eqn: Any, values: list[Any], shape: Shape) -> Array:
        def operand(value: Any, aval: Any) -> Array:
            value = jnp.asarray(value, aval.dtype)
            value = value if not aval.shape or self.is_short(shape) else self.on_lanes(value, aval.shape)
            return _broadcast(value, self.lifted(shape))

        name = eqn.primitive.name
        operands = [operand(value, atom.aval) for value, atom in zip(values, eqn.invars, strict=True)]
        if name in ("eq", "ne", "lt", "le", "gt", "ge") and operands[0].dtype == bool:
            operands = [x.astype(jnp.int32) for x in operands]
        if name == "select_n" and operands[1].dtype == bool:
            return eqn.primitive.bind(operands[0], *(x.astype(jnp.int32) for x in operands[1:])) != 0
        return eqn.primitive.bind(*operands, **eqn.params)

    def _broadcast_in_dim(self, x: Any, given: Shape, shape: Shape, dims: Sequence[int]) -> Array:
        x = jnp.asarray(x)
        if given and not (self.is_short(given) and self.is_short(shape)):
            sizes = dict(zip(dims, given, strict=True))
            x = self.on_lanes(x, given) if dims[-1] == len(shape) - 1 else self._off_lanes(x, given)
            x = _led(x, tuple(sizes.get(axis, 1) for axis in range(len(shape) - 1)))
        return _broadcast(x, self.lifted(shape))

    def _reshaped(self, x: Any, given: Shape, shape: Shape) -> Array:
        if [size for size in given if size > 1] != [size for size in shape if size > 1]:
            raise NotImplementedError(BY_SIZE)
        if not shape:
            return _led(x, ())
        if given and given[-1] == shape[-1]:
            return self.normal(_led(self.on_lanes(x, given), shape[:-1]), shape)
        if shape[-1] == 1:
            return self.normal(_led(self._off_lanes(x, given) if given else x, shape[:-1]), shape)
        if given[-1] == 1 and self.is_short(shape):
            return _led(x, shape)
        raise NotImplementedError(BY_SIZE)

    def _reduced(self, name: str, x: Array, given: Shape, shape: Shape, axes: Sequence[int]) -> Array:
        if x.dtype == jnp.uint32:  # as integers with a sign, in the same order
            sign = jnp.uint32(0 if name == "reduce_sum" else 1 << 31)
            found = self._reduced(name, lax.bitcast_convert_type(x ^ sign, jnp.int32), given, shape, axes)
            return lax.bitcast_convert_type(found, jnp.uint32) ^ sign
        reduce = {"reduce_sum": jnp.sum, "reduce_max": jnp.max, "reduce_min": jnp.min}[name]
        if self.is_short(given):
            return reduce(x, axis=0)
        last = len(given) - 1
        leading = tuple(axis for axis in axes if axis != last)
        x = reduce(x, axis=leading) if leading else x
        if last not in axes:
            return self.normal(x, shape)
        if shape and not self.is_short(shape):
            raise NotImplementedError(BY_SIZE)
        return reduce(x, axis=-1, keepdims=True)

    def _product(self, params: dict[str, Any], values: list[Array], shapes: list[Shape], shape: Shape) -> Array:
        """Return the products "g 1" of rows "g d" with a single one "1 d"."""
        if params["dimension_numbers"] != (((1,), (1,)), ((), ())) or shapes[1][0] != 1:
            raise NotImplementedError("kernels have no such operation")
        return self.normal(jnp.sum(values[0] * values[1], axis=-1, keepdims=True), shape)

    def _cut_or_padded(self, name: str, params: dict[str, Any], values: list[Any], given: Shape, shape: Shape) -> Array:
        """Return an array without the ends of its last axis, or with more numbers there."""
        if given[:-1] != shape[:-1] or params.get("strides") is not None:
            raise NotImplementedError("kernels have no such operation")
        x, last = self.on_lanes(values[0], given), len(given) - 1
        x = x.astype(jnp.int32) if x.dtype == bool else x
        if name == "slice":
            x = x[..., params["start_indices"][last] : params["limit_indices"][last]]
        else:
            widths = [(0, 0, 0)] * (x.ndim - 1) + [params["padding_config"][last]]
            x = lax.pad(x, jnp.asarray(values[1], x.dtype), widths)
        return self.normal(x != 0 if values[0].dtype == bool else x, shape)

    def _cumulated(self, x: Array, shape: Shape, params: dict[str, Any]) -> Array:
        """Return the sums up to every place of the last axis, each step over twice as many places."""
        if params["axis"] != len(shape) - 1 or params["reverse"]:
            raise NotImplementedError("kernels have no such operation")
        if self.is_short(shape):
            return jnp.stack([functools.reduce(jnp.add, x[: i + 1]) for i in range(len(x))])
        from jax.experimental.pallas import tpu as pltpu  # Mosaic takes long to import

        at = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
        for step in (1 << i for i in range((shape[-1] - 1).bit_length())):
            x = x + jnp.where(at >= step, pltpu.roll(x, step, x.ndim - 1), jnp.zeros((), x.dtype))
        return x

    def _loop(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Return a loop that runs until no row continues; rows that have ended stay as they are."""
        params, avals = eqn.params, [var.aval for var in eqn.outvars]
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        of_cond, of_body = values[:first], values[first:second]

        def inner(name: str, given: list[Any], carry: Sequence[Any]) -> list[Any]:
            jaxpr, consts = params[name].jaxpr, params[name].consts
            known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given, *carry), strict=True))
            known = self.evaluated(jaxpr.eqns, known)
            return [atom.val if isinstance(atom, core.Literal) else known[atom] for atom in jaxpr.outvars]

        def packed(carry: Sequence[Any]) -> tuple[Array, ...]:
            whole = (self.full(x, aval) for x, aval in zip(carry, avals, strict=True))
            return tuple(x.astype(jnp.int32) if x.dtype == bool else x for x in whole)

        def unpacked(carry: Sequence[Array]) -> list[Array]:
            return [x != 0 if aval.dtype == bool else x for x, aval in zip(carry, avals, strict=True)]

        def continues(carry: Sequence[Array]) -> Array:
            return self.full(inner("cond_jaxpr", of_cond, unpacked(carry))[0], jax.ShapeDtypeStruct((), bool))

        def body(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            runs = continues(carry)
            after = packed(inner("body_jaxpr", of_body, unpacked(carry)))
            return tuple(jnp.where(_broadcast(runs, x.shape), x, old) for x, old in zip(after, carry, strict=True))

        def any_continues(carry: tuple[Array, ...]) -> Array:
            return jnp.max(continues(carry).astype(jnp.float32)) > 0

        return unpacked(lax.while_loop(any_continues, body, packed(values[second:])))


def _of_integers(name: str, x: Array, by: Any = None) -> Array:
    """Return the sign of integers, or their quotients towards 0 by a power of two, or the remainders."""
    if name == "sign":
        return jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0)).astype(x.dtype)
    if isinstance(by, Tracer) or int(by) <= 0 or int(by) & (int(by) - 1):
        raise NotImplementedError("TPU kernels divide integers by powers of two only")
    by, shift = int(by), int(by).bit_length() - 1
    if x.dtype == jnp.uint32:
        return x >> shift if name == "div" else x & jnp.uint32(by - 1)
    quotient = (x + ((x >> 31) & (by - 1))) >> shift
    return quotient if name == "div" else x - (quotient << shift)

"""Basic types: axis letters, pytree dataclasses, values that compare by value, `replace`.

Axis letters, the same in every signature: `b` slots or batch rows, `r` the rows of a step, `t`
positions, `l` layers, `k` KV heads, `h` query heads, `c` the same with
those of each KV head padded for a kernel, `g` query heads per KV head, `n` blocks per slot
(`n32` packed words of 32), `m` listed blocks, `p` pages, `s` page size, `d` head dim, `e` width of a
cached token (key and value side by side, padded), `w` model width, `f` feed-forward width, `v`
vocabulary. A *block* is logical, a *page* physical.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any, Literal, TypeVar, dataclass_transform, get_type_hints

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, Int

T = TypeVar("T")

Number = float | int | np.number | Float[Array, "*b"]
"""A number of a value: a Python one at construction, an array with a row for each slot inside a step."""

Count = int | np.integer | Int[Array, "*b"]
"""An integer of a value, likewise."""

MaybeCount = Count | None
"""An integer or None, which is another structure and so another program."""


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """Return a field that is part of a tree's structure, not one of its numbers: it shapes the program."""
    return dataclasses.field(default=default, metadata={"static": True})


def derived(*, init: Literal[False] = False) -> Any:
    """Return a field that `__post_init__` computes from the others, once and in float64.

    A number computed inside a program and one computed before it may differ in the last bit.
    """
    return dataclasses.field(init=init, repr=False, default=0.0)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def pytree(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen keyword-only dataclass and JAX pytree, with all but its static fields as children.

    Unflattening bypasses `__init__`: JAX rebuilds trees around objects that are not arrays (shape
    structs, sentinels, layouts), which a shape-checking `__init__` would refuse.
    """
    return _registered(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


@dataclass_transform(frozen_default=True, field_specifiers=(static, derived))
def value(cls: type[T]) -> type[T]:
    """Return `cls` as a frozen dataclass and a pytree that is compared, hashed and printed by value.

    Fields marked `static()` are its structure and must be hashable; the others are numbers, or nested
    values. Numbers are checked at construction, never when a tree is unflattened. Two
    values of one `jax.tree.structure` run in one program.

    Raises ValueError for a field that is not a number, is NaN, or is beyond 32 bits (infinity is allowed).
    """
    worked_out = getattr(cls, "__post_init__", None)

    def check(self: Any) -> None:
        check_numbers(self)
        if worked_out is not None:
            worked_out(self)

    for name, method in (("__post_init__", check), ("__eq__", _equal), ("__hash__", _hash)):
        setattr(cls, name, method)
    return _registered(dataclasses.dataclass(frozen=True, eq=False)(cls))


_INTEGER, _REAL = (int, Count, MaybeCount), (float, Number)
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def check_numbers(owner: Any) -> None:
    """Convert the fields of a dataclass that are annotated as numbers, integers or booleans to plain Python values.

    Raises ValueError, naming the field, for one that is no number, is NaN, or is beyond 32 bits (infinity is allowed).
    """
    kinds = _kinds(type(owner))
    for field in dataclasses.fields(owner):
        given, kind = getattr(owner, field.name), kinds.get(field.name)
        if kind is bool and not isinstance(given, bool | np.bool_):
            raise ValueError(f"{type(owner).__name__}: {field.name} is {_described(given)}; it must be true or false")
        if kind in _REAL or (kind in _INTEGER and not (kind is MaybeCount and given is None)):
            object.__setattr__(owner, field.name, _plain(owner, field.name, given, integer=kind in _INTEGER))


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    """Return the annotations of a class, with those written as text resolved."""
    try:
        return get_type_hints(cls)
    except NameError:  # an unresolvable annotation: the others are returned as written
        return {
            name: kind for one in reversed(cls.__mro__) for name, kind in getattr(one, "__annotations__", {}).items()
        }


def _plain(owner: Any, name: str, given: Any, integer: bool) -> Any:
    """Return the number as Python's own; arrays with a row for each slot, and traced ones, unchanged."""
    if isinstance(given, jax.Array):
        if isinstance(given, Tracer) or given.ndim:
            return given
        given = given.item()
    wanted, kind = (numbers.Integral, "an integer") if integer else (numbers.Real, "a number")
    if not isinstance(given, wanted) or isinstance(given, bool | np.bool_):
        raise ValueError(f"{type(owner).__name__}: {name} is {_described(given)}; it must be {kind}")
    try:
        number = int(given) if integer else float(given)
    except OverflowError:  # an integer or a fraction beyond the range of floats
        number = _FLOAT32_MAX * 2
    if number != number:
        raise ValueError(f"{type(owner).__name__}: {name} is nan; it must be {kind}")
    if not abs(number) < 2**31 if integer else _FLOAT32_MAX < abs(number) < math.inf:
        raise ValueError(f"{type(owner).__name__}: {name} is {_described(given)}; it must be {kind} of 32 bits")
    return number


def _described(given: Any) -> str:
    """Return a short description of a given value."""
    if isinstance(given, int) and given.bit_length() > 200:
        return f"an integer of {given.bit_length()} bits"
    return repr(given) if isinstance(given, int | float | str | np.number) else f"of type {type(given).__name__}"


def _equal(one: Any, other: object) -> bool:
    return type(one) is type(other) and _identity(one) == _identity(other)


def _hash(one: Any) -> int:
    return hash(_identity(one))


def _identity(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return what identifies a value: its structure, and the bytes of its numbers."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf), np.asarray(leaf).tobytes()) for leaf in leaves)


def _registered(cls: type[T]) -> type[T]:
    """Return `cls`, a dataclass, registered as a pytree whose static fields are its structure."""
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields if not field.metadata.get("static"))
    fixed = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(tree):
        known = vars(tree)
        return tuple(map(known.__getitem__, names)), tuple(map(known.__getitem__, fixed))

    def flatten_with_keys(tree):
        children, structure = flatten(tree)
        return tuple(zip(map(GetAttrKey, names), children, strict=True)), structure

    def unflatten(structure, children):
        tree = object.__new__(cls)
        vars(tree).update(zip(names + fixed, (*children, *structure), strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


class Table:
    """An array that is part of a structure: compared by its bits, immutable."""

    def __init__(self, rows: Any) -> None:
        self.array = np.array(rows)
        self.array.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"Table({self.array.dtype}{list(self.array.shape)})"

    def _identity(self) -> tuple[Any, ...]:
        return self.array.dtype.str, self.array.shape, self.array.tobytes()


def replace(tree: T, **changes) -> T:
    """Return `tree` with some fields changed, like `dataclasses.replace`; classes with checks run them."""
    return dataclasses.replace(tree, **changes)

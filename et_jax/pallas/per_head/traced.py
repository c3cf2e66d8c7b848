"""A function traced for one row and KV head, and which of its operations run in a kernel."""

import dataclasses
import math
from collections.abc import Callable, Container
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from et_jax.pallas.per_head import lifted
from et_jax.pallas.per_head.flat import GPU, IN_KERNELS, MOST_NUMBERS, TPU, flat, operations
from et_jax.pallas.per_head.inputs import Input, Listed, Pages, PerHead, PerQuery, PerRow, Placed, is_input, sizes_of
from et_jax.pallas.per_head.pieces import in_pieces, variables

OVER_ALL = ("argmax", "argmin", "cumsum", "dot_general", "reduce_prod", "reduce_sum", "sort")  # repeats change these
MARKED = 11  # query heads of a second trace, which shows the axes of query heads


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of one row and head, with its inputs in order.

    jaxpr: flat, without constants, for the kernels of `chip` (`flat.GPU` or `flat.TPU`). outputs: the variable of each,
    and that of its places, None if it is not permuted. axes: the axis of the query heads of each output, None without
    one. tree: that of the outputs. group: the query heads that it is traced for.
    """

    jaxpr: Any
    outputs: tuple[tuple[Any, Any], ...]
    axes: tuple[int | None, ...]
    tree: Any
    chip: str
    group: int

    @property
    def eqns(self) -> list[Any]:
        """The operations that the outputs depend on. Selectors use few of their inputs."""
        made = {var for eqn in self.jaxpr.eqns for var in eqn.outvars}
        return needed(self.jaxpr.eqns, [var for pair in self.outputs for var in pair if var in made])[0]

    @property
    def reasons(self) -> list[str | None]:
        """The reason why each of `eqns` cannot run in a kernel, None if it can."""
        if self.chip == TPU:
            return [lifted.why_not(eqn, self.group) for eqn in self.eqns]
        pieces = in_pieces(self.eqns, (var for pair in self.outputs for var in pair if var is not None))
        return [None if i in pieces else why_not(eqn) for i, eqn in enumerate(self.eqns)]


def left_to_xla(function: Callable[..., Any], inputs: tuple[Any, ...], chip: str = "gpu") -> dict[str, tuple[str, ...]]:
    """Return the names of a function's operations that XLA runs on a GPU or TPU, by the reason why a kernel cannot.

    On a TPU those that are left to XLA for their size are not named. Raises NotImplementedError if no kernel runs any.
    """
    leaves, tree = jax.tree.flatten(inputs, is_leaf=is_input)
    found: dict[str, set[str]] = {}
    traced = traced_for(function, tree, leaves, GPU if chip == "gpu" else TPU)
    for eqn, reason in zip(traced.eqns, traced.reasons, strict=True):
        if reason is not None and reason != lifted.BY_SIZE:
            found.setdefault(reason, set()).add(eqn.primitive.name)
    return {reason: tuple(sorted(names)) for reason, names in found.items()}


def power_of_two(size: int) -> int:
    """Return the least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def traced_for(function: Callable[..., Any], tree: Any, leaves: list[Input], chip: str = GPU) -> Function:
    """Return a function as traced for these inputs. On a GPU query heads are repeated up to a power of two."""
    _, _, group = sizes_of(leaves)

    def of_leaves(*arrays: Array) -> Any:
        return function(*jax.tree.unflatten(tree, arrays))

    def traced(group: int) -> tuple[Any, list[Any], Any]:
        shapes = [_shape(leaf, group) for leaf in leaves]
        closed, outputs = jax.make_jaxpr(flat(of_leaves, chip), return_shape=True)(*shapes)
        return closed, *jax.tree.flatten(outputs, is_leaf=lambda x: isinstance(x, Placed))

    repeated = power_of_two(group) if chip == GPU else group
    closed, outputs, out_tree = traced(repeated)
    marked, shapes, _ = traced(MARKED)
    if group != repeated:
        _refuse_sums(marked.jaxpr, group)
    found = iter(closed.jaxpr.outvars)
    pairs = tuple((next(found), next(found) if isinstance(one, Placed) else None) for one in outputs)
    return Function(
        _without_constants(closed), pairs, tuple(map(_axis_of_queries, outputs, shapes)), out_tree, chip, repeated
    )


def _shape(leaf: Input, group: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an input as the function receives it, with `group` query heads."""
    match leaf:
        case Pages(pool=pool, page=page):
            shape = (*page.shape[1:], *pool.shape[2:-1], leaf.width) if pool.ndim > 2 else page.shape[1:]
            return jax.ShapeDtypeStruct(shape, pool.dtype)
        case Listed(array=array, place=place):
            return jax.ShapeDtypeStruct((group, place.shape[2]), array.dtype)
        case PerQuery(array=array):
            return jax.ShapeDtypeStruct((group, *array.shape[3:]), array.dtype)
        case PerHead(array=array):
            return jax.ShapeDtypeStruct(array.shape[2:], array.dtype)
        case PerRow(array=array):
            return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)


def _axis_of_queries(output: Any, marked: Any) -> int | None:
    """Return the axis of an output that counts query heads: the one whose size differs between the two traces."""
    if isinstance(output, Placed):
        return None
    return next((i for i, (one, two) in enumerate(zip(output.shape, marked.shape, strict=True)) if one != two), None)


def _refuse_sums(jaxpr: Any, group: int) -> None:
    """Raise NotImplementedError for an operation over the marked query heads that a repeated head would change."""
    for eqn in operations(jaxpr):
        name, params = eqn.primitive.name, eqn.params
        shape = eqn.invars[0].aval.shape if eqn.invars else ()
        over = params.get("axes", params.get("axis", params.get("dimension", ())))
        if name == "dot_general":
            over = params["dimension_numbers"][0][0]
        if name in OVER_ALL and any(shape[axis] == MARKED for axis in np.atleast_1d(np.asarray(over, int))):
            raise NotImplementedError(
                f"{name} over the {group} query heads of a KV head has no kernel: {group} is not a power of two"
            )


def _without_constants(closed: Any) -> Any:
    """Return the jaxpr of a closed one whose constants are all scalars."""
    if any(np.ndim(one) for one in closed.consts):
        raise NotImplementedError("a function that captures an array has no kernel: make the array a field of a value")
    return closed.jaxpr


def why_not(eqn: Any) -> str | None:
    """Return why an operation cannot run in a kernel, None if it can. Arrays of kernels must fit in registers."""
    inner = operations(eqn.params["body_jaxpr"].jaxpr) if eqn.primitive.name == "while" else []
    shapes = [var.aval.shape for one in (eqn, *inner) for var in (*variables(one), *one.outvars)]
    if not all(one.primitive.name in IN_KERNELS for one in (eqn, *inner)):
        return "kernels have no such operation"
    if not all(size == power_of_two(size) for shape in shapes for size in shape):
        return "kernels support only arrays of powers of two"
    if max(map(math.prod, shapes)) > MOST_NUMBERS:
        return f"kernels support arrays of at most {MOST_NUMBERS:,} numbers"
    return None


def needed(eqns: list[Any], exports: list[Any], given: Container[Any] = ()) -> tuple[list[Any], list[Any]]:
    """Return the operations that compute `exports`, in order, and the values of `given` that they use."""
    maker = {var: i for i, eqn in enumerate(eqns) for var in eqn.outvars}
    wanted, found, begin = list(exports), set(), {}
    while wanted:
        var = wanted.pop()
        if var in given or var not in maker:
            begin[var] = None
        elif maker[var] not in found:
            found.add(maker[var])
            wanted += variables(eqns[maker[var]])
    return [eqns[i] for i in sorted(found)], list(begin)

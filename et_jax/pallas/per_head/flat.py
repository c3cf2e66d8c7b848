"""A traced function as one flat list of operations that a GPU kernel mostly supports, and which ones it lacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array

# Operations of a Pallas kernel by Triton, on arrays whose sizes are powers of two. No other is known to work:
# `sort`, `gather`, `slice`, `pad`; products of matrices require sixteen rows.
_OPERATIONS = """
    abs add and argmax argmin bitcast_convert_type broadcast_in_dim ceil clamp convert_element_type cos cumsum
    div eq exp exp2 expm1 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not
    or population_count pow reduce_max reduce_min reduce_sum rem reshape rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sqrt square squeeze sub tanh transpose while xor
"""
IN_KERNELS = frozenset(_OPERATIONS.split())
GPU, TPU = "triton", "tpu"  # the platforms that `platform_dependent` sees in kernels
MOST_NUMBERS = 2**15  # of an array in a kernel: 128 kB of a multiprocessor's 256 kB of registers


def flat(function: Callable[..., Any], platform: str) -> Callable[..., Any]:
    """Return an equivalent function of arrays with all inner calls inlined.

    Code that branches on the platform takes the branch of `platform`. Barriers, which restrict XLA's fusion, are
    removed, and operations that kernels lack are replaced: `any` and `all` by maximum and minimum, products of small
    matrices by sums, rounding by an addition and a subtraction.
    """

    def run(*args: Array) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        outputs = _evaluated(closed.jaxpr, closed.consts, args, platform)
        return jax.tree.unflatten(jax.tree.structure(shape), outputs)

    return run


def _evaluated(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], platform: str) -> list[Any]:
    """Return the outputs of a jaxpr, evaluated operation by operation."""
    known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else known[var]

    for eqn in jaxpr.eqns:
        found = _operation(eqn, [read(var) for var in eqn.invars], platform)
        known.update(zip(eqn.outvars, found, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _operation(eqn: Any, values: list[Any], platform: str) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    inner = next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)
    if name in ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call") and inner is not None:
        return _evaluated(inner.jaxpr, inner.consts, values, platform)
    if name == "platform_index":
        return [next((i for i, names in enumerate(params["platforms"]) if names is None or platform in names))]
    if name == "cond" and isinstance(values[0], int):
        branch = params["branches"][values[0]]
        return _evaluated(branch.jaxpr, branch.consts, values[1:], platform)
    if name in ("optimization_barrier", "copy", "reshard", "stop_gradient"):
        return values
    if name in ("reduce_or", "reduce_and"):
        reduce = lax.reduce_max if name == "reduce_or" else lax.reduce_min
        found = reduce(lax.convert_element_type(values[0], jnp.int32), axes=params["axes"])
        return [lax.ne(found, lax.full_like(found, 0))]
    if name == "while":
        return _loop(params, values, platform)
    if name == "dot_general" and platform == GPU and _is_small(params, *values):
        return [_products(params, *values)]
    if name == "round" and platform == GPU:
        return [_rounded(values[0])]
    found = eqn.primitive.bind(*values, **params)
    return found if eqn.primitive.multiple_results else [found]


def _is_small(params: dict[str, Any], x: Any, y: Any) -> bool:
    """Return whether a product is of two matrices small enough for a kernel to sum it elementwise."""
    (_, of_batch), sizes = params["dimension_numbers"], (x.ndim, y.ndim)
    return not of_batch[0] and sizes == (2, 2) and x.size * y.size <= MOST_NUMBERS * _contracted(params, x)


def _contracted(params: dict[str, Any], x: Any) -> int:
    return x.shape[params["dimension_numbers"][0][0][0]]


def _products(params: dict[str, Any], x: Any, y: Any) -> Any:
    """Return the product of two matrices, in float32."""
    ((of_x,), (of_y,)), _ = params["dimension_numbers"]
    shape = x.shape[1 - of_x], y.shape[1 - of_y], x.shape[of_x]
    x = lax.broadcast_in_dim(lax.transpose(x.astype(jnp.float32), (1 - of_x, of_x)), shape, (0, 2))
    y = lax.broadcast_in_dim(lax.transpose(y.astype(jnp.float32), (1 - of_y, of_y)), shape, (1, 2))
    found = lax.reduce_sum(x * y, axes=(2,))
    return found.astype(params["preferred_element_type"] or found.dtype)


def _rounded(x: Any) -> Any:
    """Return the nearest integers, ties to even: above 2^22 float32 has only integers, and the sum exceeds that."""
    far = lax.full_like(x, 1.5 * 2**23)
    return lax.select(lax.abs(x) < lax.full_like(x, 2**22), (x + far) - far, x)


def _loop(params: dict[str, Any], values: list[Any], platform: str) -> Sequence[Any]:
    """Return a loop whose condition and body are flat too."""
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_cond, of_body, carry = values[:first], values[first:second], values[second:]

    def inner(name: str, given: list[Any], carry: tuple[Any, ...]) -> list[Any]:
        closed = params[name]
        return _evaluated(closed.jaxpr, closed.consts, (*given, *carry), platform)

    return lax.while_loop(
        lambda carry: inner("cond_jaxpr", of_cond, carry)[0],
        lambda carry: tuple(inner("body_jaxpr", of_body, carry)),
        tuple(carry),
    )


def operations(jaxpr: Any) -> list[Any]:
    """Return the operations of a jaxpr and of its inner loops."""
    loops = [
        eqn.params[part].jaxpr for eqn in jaxpr.eqns for part in ("cond_jaxpr", "body_jaxpr") if part in eqn.params
    ]
    return [*jaxpr.eqns, *(eqn for one in loops for eqn in operations(one))]

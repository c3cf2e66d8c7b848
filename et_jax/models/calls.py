"""Calls of attention in the program of a module, made outside of the transforms that stand around them.

`nnx.jit` and `nnx.remat` trace a part of a module by itself: nothing gets out of it but what it returns, so what the
decoder remembers cannot go from layer to layer there. The module is therefore traced with a mark for each call, and
its program run from the outside: what holds a mark is run in place, and at each mark the caller's attention is asked.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Literal, Primitive
from jax.interpreters import batching

from et_jax.errors import UsageError

_MARK = Primitive("attention")
_MARK.def_abstract_eval(lambda query, key, value, own=None: query if own is None else own)
_INLINED = {"jit", "pjit", "checkpoint", "remat2", "closed_call", "custom_jvp_call", "custom_vjp_call"}


def marked(query: jax.Array, key: jax.Array, value: jax.Array, *own: jax.Array) -> jax.Array:
    """Stand for a call of attention, of the shape of `query`; or of `own`, what the module itself made of it."""
    return _MARK.bind(query, key, value, *own)


def run(function: Callable[..., Any], attend: Callable[..., jax.Array], *given: Any) -> Any:
    """Return `function(*given)`, with `attend` called in turn on what each of its marks was given, for its own result.

    All of `given`, and of what comes back, are arrays. Raises UsageError as `calls`.
    """
    program, shape = jax.make_jaxpr(function, return_shape=True)(*given)
    return jax.tree.unflatten(jax.tree.structure(shape), _run(program, jax.tree.leaves(given), attend))


def calls(program: Any) -> Iterator[list[Any]]:
    """Yield for each mark of a program, in turn, the shapes and dtypes of what it is given.

    Raises UsageError for marks within loops and branches, which cannot be told apart.
    """
    for step in program.eqns:
        if step.primitive is _MARK:
            yield [one.aval for one in step.invars]
        for inner in inner_programs(step):
            for call in calls(inner):
                if step.primitive.name not in _INLINED:
                    raise UsageError(
                        f"The module calls its attention_fn within a {step.primitive.name} of JAX; call its layers one "
                        "after another in Python, with nothing around them but nnx.jit and nnx.remat."
                    )
                yield call


def inner_programs(step: Any) -> Iterator[Any]:
    """Yield the programs that a step of a program holds."""
    for value in step.params.values():
        yield from (one for one in (value if isinstance(value, tuple | list) else (value,)) if hasattr(one, "eqns"))


def _run(program: Any, given: Sequence[Any], attend: Callable[..., jax.Array]) -> list[Any]:
    known = dict(zip([*program.constvars, *program.invars], [*program.consts, *given], strict=True))
    for step in program.eqns:
        ins = [one.val if isinstance(one, Literal) else known[one] for one in step.invars]
        if step.primitive is _MARK:
            outs = [attend(*ins)]
        elif any(True for inner in inner_programs(step) for _ in calls(inner)):
            outs = _run(next(inner_programs(step)), ins, attend)
        else:
            with step.ctx.manager:
                made = step.primitive.bind(*ins, **step.primitive.get_bind_params(step.params))
            outs = made if step.primitive.multiple_results else [made]
        known |= zip(step.outvars, outs, strict=True)
    return [one.val if isinstance(one, Literal) else known[one] for one in program.outvars]


def _refuse_rows(*_: Any, **__: Any) -> None:
    raise UsageError(
        "The module calls its attention_fn within a vmap; call its layers on the whole batch, one after another in "
        "Python."
    )


batching.primitive_batchers[_MARK] = _refuse_rows

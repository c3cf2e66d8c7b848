"""The initial signals and control state of a sequence; and what its laws set."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from et_jax.control import budget as budgets
from et_jax.control.base import ControlState, Signals, started, updated
from et_jax.control.controller import Controller

T = TypeVar("T")


def blank_signals(shape: tuple[int, ...]) -> Signals:
    """Return signals before the first observation."""
    fields = {f.name: jnp.zeros(shape, jnp.float32) for f in dataclasses.fields(Signals)}
    integers = ("blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "allocated_pages")
    return Signals(**(fields | {name: jnp.zeros(shape, jnp.int32) for name in integers}))


def law_numbers(laws: T) -> T:
    """Return a controller, or laws, with numbers as arrays of 32 bits, as a state stores them."""
    return jax.tree.map(lambda x: np.asarray(x, np.int32 if isinstance(x, int) else np.float32), laws)


def fresh(
    laws: Controller, temperature: Float[Array, ""], mask: tuple[int, int, int], prompt: budgets.PromptRecord | None
) -> ControlState:
    """Return the control state of one sequence under `laws` before its first token; `mask` is the shape of its own."""
    zero = jnp.zeros((), jnp.float32)
    return started(
        laws.law,
        ControlState(
            entropy=zero,
            entropic_time=zero,
            total_cost=zero,
            temperature=temperature,
            surprisal_cap=jnp.full((), jnp.inf, jnp.float32),
            tolerance=zero,
            refresh=jnp.ones((), bool),
            priority=zero,
            wait=jnp.zeros((), jnp.int32),
            block_mask=jnp.zeros(mask, jnp.uint32),
            records={},
            prompt=prompt,
        ),
    )


READING = frozenset({"tolerance", "refresh", "block_mask"})
"""The fields of `ControlState` that determine what the next token reads."""


def law_sets(
    laws: Controller, mask: tuple[int, int, int], prompt: Callable[[], budgets.PromptRecord | None]
) -> frozenset[str]:
    """Return the fields of `ControlState` that the law sets, records aside; a sequence's mask has this shape.

    A law without declared `sets`, such as a plain function, is traced.
    """
    if laws.law.sets is not None:
        return laws.law.sets
    found = set[str]()

    def start(temperature: Float[Array, ""]) -> ControlState:
        return fresh(law_numbers(laws), temperature, mask, prompt())

    def run(signals: Signals, state: ControlState) -> ControlState:
        after = updated(laws.law, signals, state)
        names = {field.name for field in dataclasses.fields(state)} - {"records"}
        found.update(name for name in names if getattr(after, name) is not getattr(state, name))
        return after

    jax.eval_shape(run, blank_signals(()), jax.eval_shape(start, jnp.zeros((), jnp.float32)))
    return frozenset(found)

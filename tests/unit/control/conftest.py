"""Rows for laws: signals and states with every field filled, and a law run over many tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.base import ControlState, Signals, as_value, updated

WHOLE = {"blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "allocated_pages"}


@pytest.fixture(scope="session")
def signals():
    """Return a function that fills the signals it is not given with zeros, of one common shape."""
    kinds = {field.name: jnp.int32 if field.name in WHOLE else jnp.float32 for field in dataclasses.fields(Signals)}

    def build(**fields) -> Signals:
        shape = np.broadcast_shapes(*map(np.shape, fields.values()))
        arrays = {name: jnp.asarray(fields.get(name, 0), kind) for name, kind in kinds.items()}
        return Signals(**{name: jnp.broadcast_to(x, shape) for name, x in arrays.items()})

    return build


@pytest.fixture(scope="session")
def state():
    """Return a function that gives the state of new sequences, as `law` starts them."""

    def build(law=None, shape=(), **fields) -> ControlState:
        zeros = ("entropy", "entropic_time", "total_cost", "tolerance", "priority", "wait")
        numbers = dict.fromkeys(zeros, 0.0) | {"temperature": 1.0, "surprisal_cap": np.inf, "refresh": True} | fields
        kinds = dict.fromkeys(numbers, jnp.float32) | {"wait": jnp.int32, "refresh": bool}
        arrays = {name: jnp.broadcast_to(jnp.asarray(x, kinds[name]), shape) for name, x in numbers.items()}
        start = ControlState(**arrays, block_mask=jnp.zeros((*shape, 1, 1, 1), jnp.uint32), records={})
        return start if law is None else law.init(start)

    return build


@pytest.fixture(scope="session")
def run():
    """Return a function that runs a law over signals with a leading axis of tokens: every state, in order."""

    @jax.jit
    def over(law, start: ControlState, seen: Signals) -> ControlState:
        return jax.lax.scan(lambda state, one: (updated(law, one, state),) * 2, start, seen)[1]

    return lambda law, start, seen: over(as_value(law), start, seen)

"""Rows for laws: signals and states with every field filled, and a law run over many tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control.base import ControlState, Signals, as_value, updated
from et_jax.types import replace

WHOLE = {"blocks_read", "summaries_read", "length", "generated", "remaining", "arrival", "pages_held"}


@pytest.fixture(scope="session")
def signals():
    """Return a function that fills the signals it is not given with zeros, of one common shape."""

    def build(**fields) -> Signals:
        shape = np.broadcast_shapes(*(np.shape(value) for value in fields.values()))
        return Signals(
            **{
                field.name: jnp.broadcast_to(
                    jnp.asarray(fields.get(field.name, 0), jnp.int32 if field.name in WHOLE else jnp.float32), shape
                )
                for field in dataclasses.fields(Signals)
            }
        )

    return build


@pytest.fixture(scope="session")
def state():
    """Return a function that gives the state of new sequences, as `law` starts them."""

    def build(law=None, shape=(), **fields) -> ControlState:
        zero = jnp.zeros(shape, jnp.float32)
        start = ControlState(
            entropy=zero,
            entropic_time=zero,
            total_cost=zero,
            temperature=zero + 1.0,
            surprisal_cap=zero + jnp.inf,
            tolerance=zero,
            priority=zero,
            wait=jnp.zeros(shape, jnp.int32),
            block_mask=jnp.zeros((*shape, 1, 1, 1), jnp.uint32),
            notes={},
        )
        fields = {
            name: jnp.broadcast_to(jnp.asarray(value, getattr(start, name).dtype), shape)
            for name, value in fields.items()
        }
        start = replace(start, **fields)
        return start if law is None else law.init(start)

    return build


@pytest.fixture(scope="session")
def run():
    """Return a function that runs a law over signals with a leading axis of tokens: every state, in order."""

    @jax.jit
    def over(law, start: ControlState, seen: Signals) -> ControlState:
        return jax.lax.scan(lambda state, one: (updated(law, one, state),) * 2, start, seen)[1]

    return lambda law, start, seen: over(as_value(law), start, seen)

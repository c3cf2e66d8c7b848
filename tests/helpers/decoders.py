"""The decoders that the tests of this folder drive, each made once, and a user's own doors in five lines or fewer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from small_model import PAGE, configuration

from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.select import SinksWindow
from et_jax.decode import decoder as decoding
from et_jax.types import replace


def by_entropy(signals, state):
    return replace(state, temperature=0.5 + 0.1 * signals.entropy)


def a_little_warmer(moments_at, signals, state):
    entropy, _ = moments_at(jnp.float32(1.0))
    return state.temperature + 0.01 * entropy


def even_blocks(view):
    return (view.start // PAGE) % 2 == 0


@functools.cache
def made(name: str) -> decoding.Decoder:
    """The decoder of this name."""
    own = Controller(law=chain(FallClock(), by_entropy), temperature_rule=a_little_warmer)
    sparse = Controller(selector=(SinksWindow(2, 6), even_blocks))
    changes = {
        "plain": {},
        "sparse": {"controller": sparse},
        "own": {"controller": own},
    }
    return decoding.decoder(configuration(**changes[name]))


def row_of(state, slot: int):
    """Everything of one slot but the count of its waiting and the score that waiting changes."""
    fields = ("token", "length", "generated", "limit", "active", "arrival", "sampling", "signals")
    rows = {name: getattr(state, name) for name in fields}
    rows |= {name: x for name, x in vars(state.control).items() if name not in ("wait", "priority")}
    return jax.tree.map(
        lambda x: np.array(x[slot]), rows | {"pages": state.table.pages, "blocks": state.table.num_blocks}
    )

"""Who is served by a step: of the slots that may run, those of highest priority."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import configuration

from et_jax.control.controller import Controller
from et_jax.decode.state import empty
from et_jax.decode.step import choose

PRIORITIES = np.asarray([3.0, 1.0, np.nan, 2.0, -np.inf], np.float32)


def by_arrival(signals, state):
    """The priority that a sequence was given as its number of arrival."""
    return jnp.asarray(PRIORITIES)[signals.arrival]


@pytest.mark.parametrize(
    ("active", "served"),
    [
        ([0, 1, 2, 3, 4], [2, 0, 3]),  # what is no number first
        ([0, 1, 3], [0, 3, 1]),
        ([4], [4]),  # the lowest of all before slots that are empty
        ([1, 4], [1, 4]),
        ([], []),
    ],
)
def test_the_highest_priorities_are_served_and_the_lowest_before_nobody(active, served):
    config = configuration(num_slots=5, batch=3, controller=Controller(priority=by_arrival))
    state = empty(config)
    runs = jnp.zeros(5, bool).at[jnp.asarray(active, jnp.int32)].set(True)
    state = dataclasses.replace(state, active=runs, arrival=jnp.arange(5, dtype=jnp.int32))
    _, rows = choose(config, state)
    assert np.asarray(rows.slot)[np.asarray(rows.run)].tolist() == served

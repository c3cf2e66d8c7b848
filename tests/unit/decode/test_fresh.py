"""What a law says that it sets is what it sets, and a law that does not say is traced."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from every_law import values

from et_jax.control import guards, temperature
from et_jax.control.base import Function, Law, chain, updated
from et_jax.control.controller import Controller
from et_jax.decode.fresh import READING, blank_signals, fresh, law_numbers, law_sets
from et_jax.types import replace, value

LAWS = [one for one in values() if isinstance(one, Law) and not isinstance(one, Function)]


@value
class Loosened(temperature.Fixed):
    """A law derived from one that sets nothing."""

    def __call__(self, signals, state):
        return replace(state, tolerance=0.1 * signals.entropy)


def steers(law) -> bool:
    return not READING.isdisjoint(law_sets(Controller(law=law), (1, 1, 1), lambda: None))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_a_law_sets_what_it_says(law):
    changed = set()

    def run(signals, state):
        after = updated(chain(law), signals, state)
        fields = [field.name for field in dataclasses.fields(state) if field.name != "records"]
        changed.update(name for name in fields if getattr(after, name) is not getattr(state, name))
        return after

    begun = jax.eval_shape(lambda: fresh(law_numbers(Controller(law=law)), jnp.zeros((), jnp.float32), (1, 1, 1), None))
    jax.eval_shape(run, blank_signals(()), begun)
    assert law.sets == changed
    assert steers(law) == bool(changed & {"tolerance", "refresh"})


def test_a_law_that_does_not_say_what_it_sets_is_traced():
    def pruning(signals, state):
        return replace(state, tolerance=0.1 * signals.entropy)

    def warming(signals, state):
        return replace(state, temperature=0.1 * signals.entropy)

    for law in (pruning, Loosened(), chain(temperature.Thermostat(2.0), pruning), guards.Floored(pruning, 0.1)):
        assert chain(law).sets is None and steers(law)
    assert chain(warming).sets is None and not steers(warming)

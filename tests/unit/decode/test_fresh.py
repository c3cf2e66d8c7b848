"""What a law says that it sets is what it sets, and a law that does not say is traced."""

import dataclasses
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax import control
from et_jax.control import clock, guards, priority, smoothing, temperature, tolerance
from et_jax.control.base import Chain, Function, Law, chain, updated
from et_jax.control.controller import Controller
from et_jax.decode.fresh import blank_signals, fresh, law_numbers, law_steers
from et_jax.types import replace, value

WARM = temperature.Thermostat(2.0)
LAWS = [
    clock.FallClock(),
    clock.RecordClock(),
    clock.ChainRuleClock(),
    clock.Beside(clock.FallClock(), "second"),
    priority.EntropyDrift(),
    smoothing.EmaEntropy(),
    temperature.Fixed(),
    WARM,
    temperature.DampedThermostat(2.0),
    temperature.Mirostat2(3.0),
    tolerance.Constant(0.1),
    tolerance.EntropyThreshold(0.1, 2.0),
    tolerance.EntropyTolerance(),
    tolerance.Shuffled(np.ones((2, 3))),
    guards.Clipped(WARM, "tolerance", 0.0, 1.0),
    guards.NeverAboveStart(WARM, "temperature"),
    guards.RateLimited(tolerance.EntropyTolerance(), "tolerance", 0.1),
    guards.Floored(tolerance.EntropyTolerance(), 0.1),
    guards.Saturation(WARM, "temperature", 0.1, 2.0),
    guards.Stability(WARM, 0.05),
    chain(WARM, smoothing.EmaEntropy(), tolerance.EntropyTolerance()),
]


@value
class Loosened(temperature.Fixed):
    """A law derived from one that sets nothing."""

    def __call__(self, signals, state):
        return replace(state, tolerance=0.1 * signals.entropy)


def steers(law) -> bool:
    return law_steers(Controller(law=law), (1, 1, 1), lambda: None)


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
    assert steers(law) == ("tolerance" in changed)


def test_every_law_is_among_them():
    names = [found.name for found in pkgutil.iter_modules(control.__path__)]
    members = [vars(importlib.import_module(f"et_jax.control.{name}")).values() for name in names]
    laws = {one for each in members for one in each if isinstance(one, type) and issubclass(one, Law)}
    public = {one for one in laws if not one.__name__.startswith("_")} - {Law, Function}
    assert public <= {type(law) for law in LAWS} and Chain in public


def test_a_law_that_does_not_say_what_it_sets_is_traced():
    def pruning(signals, state):
        return replace(state, tolerance=0.1 * signals.entropy)

    def warming(signals, state):
        return replace(state, temperature=0.1 * signals.entropy)

    for law in (pruning, Loosened(), chain(WARM, pruning), guards.Floored(pruning, 0.1)):
        assert chain(law).sets is None and steers(law)
    assert chain(warming).sets is None and not steers(warming)

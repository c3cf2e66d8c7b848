"""Guards: what they bound stays bounded, and what they count is counted."""

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import guards
from et_jax.control.base import Law, chain
from et_jax.control.clock import FallClock
from et_jax.control.temperature import Mirostat2, Thermostat
from et_jax.control.tolerance import Constant
from et_jax.types import replace


def follow(signals, state):
    """Set the temperature to the entropy seen: a law that goes wherever it is sent."""
    return replace(state, temperature=signals.entropy, tolerance=signals.entropy_high + signals.entropy_low)


CLIPPED = guards.Clipped(Mirostat2(3.0, 1.0), "surprisal_cap", 1.0, 5.0)
LIMITED = guards.RateLimited(follow, "temperature", rise=0.5, fall=2.0)
FLOORED = guards.Floored(follow, 1.0)
PATHS = hnp.arrays(np.float32, 20, elements=st.floats(0, 10, width=32))
quick = settings(max_examples=25, deadline=None)


@quick
@given(path=PATHS)
def test_clipped_keeps_the_field_in_range_without_winding_up(signals, state, run, path):
    start = state(CLIPPED)
    assert start.surprisal_cap == 5.0
    got = np.asarray(run(CLIPPED, start, signals(surprisal=path)).surprisal_cap)
    last = 5.0
    for t, surprisal in enumerate(path.astype(np.float64)):
        last = min(max(last - (surprisal - 3.0), 1.0), 5.0)
        np.testing.assert_allclose(got[t], last, atol=1e-4)


@quick
@given(path=PATHS)
def test_rate_limited_moves_no_faster_than_it_may(signals, state, run, path):
    got = np.asarray(run(LIMITED, state(LIMITED), signals(entropy=path)).temperature)
    last = 1.0
    for t, wanted in enumerate(path.astype(np.float64)):
        last = min(max(wanted, last - 2.0), last + 0.5)
        np.testing.assert_allclose(got[t], last, atol=1e-5)


@quick
@given(path=PATHS)
def test_floored_raises_every_raw_entropy(signals, state, run, path):
    states = run(FLOORED, state(FLOORED), signals(entropy=path, entropy_low=path / 2, entropy_high=path * 2))
    np.testing.assert_allclose(states.temperature, np.maximum(path, 1.0))
    np.testing.assert_allclose(states.tolerance, np.maximum(path / 2, 1) + np.maximum(path * 2, 1), rtol=1e-6)


def test_counters_count_tokens_and_events(signals, state, run):
    law = guards.Saturation(guards.Stability(follow, gain=0.5), "temperature", 0.5, 2.0)
    start = state(law)
    assert guards.rate(start, "temperature_saturation") == 0
    seen = signals(entropy=np.array([0.5, 1.0, 2.0, 3.0]), tempered_varentropy=np.array([3.9, 4.0, 9.0, 0.0]))
    states = run(law, start, seen)
    np.testing.assert_allclose(guards.rate(states, "temperature_saturation"), [1, 1 / 2, 2 / 3, 3 / 4])
    np.testing.assert_allclose(guards.rate(states, "stability"), [0, 1 / 2, 2 / 3, 1 / 2])


def test_an_unreachable_target_shows_as_saturation(signals, state, run):
    law = guards.Saturation(Thermostat(50.0, 0.05, 0.1, 2.0), "temperature", 0.1, 2.0)
    states = run(law, state(law), signals(tempered_entropy=np.full(40, 3.0)))
    assert guards.rate(states, "temperature_saturation")[-1] > 0.9


def test_guards_keep_the_notes_and_starting_values_of_the_law_within(state):
    law = chain(guards.RateLimited(Constant(0.3), "tolerance", 0.1), guards.Floored(Mirostat2(2.0), 0.1))
    assert isinstance(law, Law)
    start = state(law)
    np.testing.assert_allclose([start.tolerance, start.surprisal_cap], [0.3, 4.0])


@quick
@given(path=PATHS, first=st.floats(0.125, 8, width=32))
def test_never_above_start_only_lowers(signals, state, run, path, first):
    start = state(temperature=first)
    start = CAPPED.init(start)
    got = np.asarray(run(CAPPED, start, signals(entropy=path)).temperature)
    np.testing.assert_array_equal(got, np.minimum(path, np.float32(first)))


CAPPED = guards.NeverAboveStart(follow, "temperature")


def test_rates_lists_every_counting_guard_and_nothing_else(signals, state, run):
    law = chain(
        FallClock(),
        guards.Stability(
            guards.Saturation(guards.NeverAboveStart(follow, "temperature"), "temperature", 1.0, 5.0), 2.0
        ),
    )
    end = run(law, law.init(state(temperature=9.0)), signals(entropy=np.array([0.5, 2.0, 3.0, 7.0])))
    got = guards.rates(end)
    assert set(got) == {"stability", "temperature_saturation"}
    np.testing.assert_allclose(got["temperature_saturation"], [1, 1 / 2, 1 / 3, 1 / 2])

"""Clocks: entropic time against its identities."""

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import clock

LENGTH = 24
ENTROPIES = hnp.arrays(np.float32, LENGTH, elements=st.floats(0, 12, width=32))
NOISE = 0.25
PAPER, DEADBAND, RECORD = clock.FallClock(), clock.FallClock(NOISE), clock.RecordClock()
EXPECTED, REALISED = clock.ChainRuleClock(), clock.ChainRuleClock(realised=True)
BESIDE = clock.Beside(clock.RecordClock(), "second_clock")
quick = settings(max_examples=30, deadline=None)


@quick
@given(entropies=ENTROPIES)
def test_paper_time_is_half_of_total_variation_and_net_fall(signals, state, run, entropies):
    tau = run(PAPER, state(PAPER), signals(entropy=entropies)).entropic_time
    h = entropies.astype(np.float64)
    variation = np.abs(np.diff(h)).cumsum()
    assert tau[0] == 0
    np.testing.assert_allclose(tau[1:], (variation + h[0] - h[1:]) / 2, atol=1e-4)


@quick
@given(entropies=ENTROPIES)
def test_deadband_counts_only_what_exceeds_twice_the_noise(signals, state, run, entropies):
    tau = run(DEADBAND, state(DEADBAND), signals(entropy=entropies)).entropic_time
    falls = -np.diff(entropies.astype(np.float64))
    np.testing.assert_allclose(tau[1:], np.maximum(0, falls - 2 * NOISE).cumsum(), atol=1e-4)


@quick
@given(noise=hnp.arrays(np.float32, LENGTH, elements=st.floats(-NOISE, NOISE, width=32)))
def test_deadband_ignores_an_entropy_that_only_seems_to_move(signals, state, run, noise):
    seen = signals(entropy=3.0 + noise)
    assert run(DEADBAND, state(DEADBAND), seen).entropic_time[-1] <= 1e-5


@quick
@given(entropies=ENTROPIES)
def test_record_is_the_depth_below_the_first_entropy(signals, state, run, entropies):
    tau = run(RECORD, state(RECORD), signals(entropy=entropies)).entropic_time
    np.testing.assert_allclose(tau, entropies[0] - np.minimum.accumulate(entropies), atol=1e-4)
    assert tau[-1] <= entropies[0] + 1e-4


@quick
@given(entropies=ENTROPIES, surprisals=ENTROPIES)
def test_chain_rule_sums_entropies_or_surprisals(signals, state, run, entropies, surprisals):
    seen = signals(entropy=entropies, surprisal=surprisals)
    expected = run(EXPECTED, state(EXPECTED), seen).entropic_time
    realised = run(REALISED, state(REALISED), seen).entropic_time
    np.testing.assert_allclose(expected, entropies.astype(np.float64).cumsum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(realised, surprisals.astype(np.float64).cumsum(), rtol=1e-5, atol=1e-5)


def test_a_clock_beside_another_leaves_it_alone(signals, state, run):
    from et_jax.control.base import chain

    seen = signals(entropy=np.array([3, 1, 2, 0.5], np.float32))
    pair = chain(PAPER, BESIDE)
    states = run(pair, state(pair), seen)
    np.testing.assert_allclose(states.entropic_time, [0, 2, 2, 3.5])
    np.testing.assert_allclose(states.notes["second_clock"].entropic_time, [0, 2, 2, 2.5])

"""Priority: the formulas, and the wait that aging can never exceed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import priority


def test_expected_fall_is_the_mean_of_the_positive_part():
    mean, deviation = (x.ravel() for x in np.meshgrid(np.linspace(-4, 4, 17), np.linspace(0.05, 3, 12)))
    x = np.linspace(mean - 12 * deviation, mean + 12 * deviation, 20_001)
    density = np.exp(-((x - mean) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))
    expected = (np.maximum(x, 0) * density).sum(0) * (x[1] - x[0])
    got = priority.expected_fall(jnp.asarray(mean, jnp.float32), jnp.asarray(deviation, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-6)
    certain = priority.expected_fall(jnp.asarray([-1.0, 0.0, 2.0]), jnp.zeros(3))
    np.testing.assert_array_equal(certain, [0.0, 0.0, 2.0])


DRIFT = priority.EntropyDrift(0.8, prior_deviation=0.5)


def test_drift_keeps_the_running_mean_and_variance_of_the_falls(signals, state, run):
    h = np.array([5.0, 3.5, 4.0, 0.5, 0.25])
    notes = run(DRIFT, state(DRIFT), signals(entropy=h)).notes["entropy_drift"]
    mean, variance = 0.0, 0.25
    np.testing.assert_allclose([notes.mean[0], notes.variance[0]], [mean, variance])
    for t in range(1, len(h)):
        fall = h[t - 1] - h[t]
        # The weighted moments of the old distribution and one new point.
        old = mean
        mean = 0.8 * old + 0.2 * fall
        variance = 0.8 * (variance + old**2) + 0.2 * fall**2 - mean**2
        np.testing.assert_allclose(notes.mean[t], mean, rtol=1e-5)
        np.testing.assert_allclose(notes.variance[t], variance, rtol=1e-4)


def test_paper_priorities_by_hand(signals, state):
    start = state(DRIFT)  # mean 0, deviation 1/2: E = deviation / sqrt(2 pi)
    seen = signals(cost=4e6, pages_held=3, urgency=0.25)
    fall = 0.5 / np.sqrt(2 * np.pi)
    linear = priority.LinearPriority(fall=2.0, cost=1e-7, memory=0.01, urgency=3.0)
    np.testing.assert_allclose(linear(seen, start), 2 * fall - 0.4 - 0.03 + 0.75, rtol=1e-5)
    ratio = priority.RatioPriority(fall=2.0, memory=1e6, urgency=3.0)
    np.testing.assert_allclose(ratio(seen, start), 2 * fall / 7e6 + 0.75, rtol=1e-6)
    new = priority.RatioPriority()(signals(cost=0.0), start)
    np.testing.assert_allclose(new, fall, rtol=1e-5)
    with pytest.raises(ValueError, match="add the law EntropyDrift"):
        linear(seen, state())


@pytest.mark.parametrize(
    ("rule", "field"),
    [(priority.FCFS(), "arrival"), (priority.SRPT(), "remaining"), (priority.LeastAttained(), "generated")],
)
def test_the_least_of_what_a_rule_goes_by_is_served_first(signals, state, rule, field):
    """Whatever else differs, and where counts are large and differ by one."""
    figures = {"arrival": [0, 4, 3, 1, 2], "remaining": [7, 9, 900, 4_000, 3_999], "generated": [5, 0, 3, 4_000, 3_999]}
    score = jax.vmap(rule)(signals(**{name: np.array(x) for name, x in figures.items()}), state(shape=(5,)))
    np.testing.assert_array_equal(np.argsort(-score), np.argsort(figures[field]))
    assert field == "arrival" or np.all((score > 0) & (score <= 1))


SLOTS = 7
SETTINGS = [(1.0, 0.1), (0.3, 0.1), (2.0, 1.0), (5.0, 0.37), (0.5, 3.0)]


def aged(ceiling, rate, raw, wait):
    """The formula, in float32."""
    return np.clip(np.float32(raw), 0, np.float32(ceiling)) + np.float32(rate) * wait.astype(np.float32)


@pytest.mark.parametrize(("ceiling", "rate"), SETTINGS)
def test_an_aged_rule_is_its_formula(signals, state, ceiling, rate):
    rng = np.random.default_rng(0)
    raw, wait = np.append(rng.uniform(-2, 2, 98) * ceiling, [-1e6, 1e6]), rng.integers(0, 200, 100)
    rule = jax.vmap(priority.Aged(lambda s, _: s.urgency, ceiling, rate))
    got = rule(signals(urgency=raw), state(shape=(100,), wait=wait))
    np.testing.assert_allclose(got, aged(ceiling, rate, raw, wait), rtol=2e-7)


def longest_wait(ceiling, rate, num_runnable, served, steps, choose):
    """Serve the `served` best of `num_runnable` for `steps` steps, ties to the higher slot; slot 0's longest wait.

    `choose` gives the raw priorities and which sequences a newcomer replaces before the step.
    """
    wait, longest = np.zeros(SLOTS, np.int64), 0
    for _ in range(steps):
        raw, new = choose()
        wait = np.where(new, 0, wait)
        scores = np.where(np.arange(SLOTS) < num_runnable, aged(ceiling, rate, raw, wait), -np.inf)
        best = np.lexsort((-np.arange(SLOTS), -scores))[:served]
        wait = wait + 1
        wait[best] = 0
        longest = max(longest, int(wait[0]))
    return longest


@pytest.mark.parametrize(("ceiling", "rate"), SETTINGS)
@settings(max_examples=12, deadline=None)
@given(
    num_runnable=st.integers(1, SLOTS),
    served=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    churn=st.floats(0, 0.5),
    lucky=st.floats(0, 1),
)
def test_no_sequence_waits_longer_than_the_aging_bound(ceiling, rate, num_runnable, served, seed, churn, lucky):
    """The adversary scores the victim below 0, others beyond any ceiling, and sends newcomers at will."""
    rng = np.random.default_rng(seed)

    def choose():
        raw = np.where(rng.uniform(size=SLOTS) < lucky, 1e6, rng.uniform(-2, 2, size=SLOTS) * ceiling)
        raw[0] = -1e6
        new = rng.uniform(size=SLOTS) < churn
        new[0] = False
        return raw, new

    bound = priority.waiting_bound(ceiling, rate, num_runnable, served)
    assert longest_wait(ceiling, rate, num_runnable, served, 3 * bound + 10, choose) <= bound


def test_the_aging_bound_by_hand():
    settings = [(1.0, 0.1, 7, 1), (0.3, 0.1, 7, 2), (2.0, 1.0, 1, 3), (5.0, 0.37, 9, 4), (0.5, 3.0, 2, 1)]
    assert [priority.waiting_bound(*each) for each in settings] == [17, 7, 3, 16, 2]

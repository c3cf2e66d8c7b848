"""Priority: the formulas, and the wait that aging can never exceed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
    """Of the old distribution and one new point, by their weights."""
    h = np.array([5.0, 3.5, 4.0, 0.5, 0.25])
    notes = run(DRIFT, state(DRIFT), signals(entropy=h)).notes["entropy_drift"]
    means, variances = [0.0], [0.25]
    for fall in -np.diff(h):
        old = means[-1]
        means.append(0.8 * old + 0.2 * fall)
        variances.append(0.8 * (variances[-1] + old**2) + 0.2 * fall**2 - means[-1] ** 2)
    np.testing.assert_allclose(notes.mean, means, rtol=1e-5)
    np.testing.assert_allclose(notes.variance, variances, rtol=1e-4)


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


@pytest.mark.parametrize(("ceiling", "rate"), [(1.0, 0.1), (2.0, 1.0), (5.0, 0.37)])
def test_an_aged_rule_is_its_formula(signals, state, ceiling, rate):
    rng = np.random.default_rng(0)
    raw, wait = np.append(rng.uniform(-2, 2, 98) * ceiling, [-1e6, 1e6]), rng.integers(0, 200, 100)
    rule = jax.vmap(priority.Aged(lambda s, _: s.urgency, ceiling, rate))
    got = rule(signals(urgency=raw), state(shape=(100,), wait=wait))
    np.testing.assert_allclose(got, np.clip(raw, 0, ceiling) + rate * wait, rtol=1e-6)


def test_the_aging_bound_by_hand():
    settings = [(1.0, 0.1, 7, 1), (0.3, 0.1, 7, 2), (2.0, 1.0, 1, 3), (5.0, 0.37, 9, 4), (0.5, 3.0, 2, 1)]
    assert [priority.waiting_bound(*each) for each in settings] == [17, 7, 3, 16, 2]

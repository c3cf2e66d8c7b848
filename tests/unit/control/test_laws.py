"""Laws over sequences of tokens against closed forms in float64: clocks, filters, tolerances, guards, priorities.

Where there is no closed form the recursion is written out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.control import clock, guards, priority, refresh, temperature, tolerance
from et_jax.control.base import chain
from et_jax.control.smoothing import EmaEntropy
from et_jax.types import replace

TOKENS, SEQUENCES = 24, 6


def follow(signals, state):
    """Set the temperature to the entropy, and the tolerance to the sum of the entropy and its bounds."""
    total = signals.entropy + signals.entropy_high + signals.entropy_low
    return replace(state, temperature=signals.entropy, tolerance=total)


def falls(x):
    """How far the entropy falls at each token; nothing at the first."""
    return np.concatenate([np.zeros((1, SEQUENCES)), -np.diff(x["entropy"], axis=0)])


def filtered(decay):
    """e_t = d^t H_0 + (1 - d) sum_{i > 0} d^(t - i) H_i, whose weights sum to 1."""

    def expected(x):
        t = np.arange(TOKENS)
        weight = np.where(t > t[:, None], 0.0, decay ** np.maximum(t[:, None] - t, 0)) * np.where(t == 0, 1, 1 - decay)
        np.testing.assert_allclose(weight.sum(1), 1.0)
        return weight @ x["entropy"]

    return expected


def loop(first, step):
    """The recursion x_t = step(x_{t-1}, signals of token t) from `first`."""

    def expected(x):
        last, rows = np.full(SEQUENCES, first, np.float64), []
        for t in range(TOKENS):
            last = step(last, **{name: each[t] for name, each in x.items()})
            rows.append(last)
        return np.stack(rows)

    return expected


def cooled(last, gain, tempered_entropy):
    return np.clip(last * np.exp(-gain * (tempered_entropy - 2.0)), 0.5, 1.5)


def tolerated(last, entropy_high, varentropy, margin, **_):
    certainty = np.clip((2.0 - np.maximum(entropy_high, 0.1)) / 1.9, 0, 1)
    certainty = np.where((varentropy > 9.0) | (margin < 0.3), 0.0, certainty)
    return np.minimum(np.exp((1 - certainty) * np.log(1e-3) + certainty * np.log(5e-2)), 1.25 * last)


REPLAYED = np.array([[0.3, 0.1, 0.2], [0.6, 0.4, 0.5]], np.float32)


def replayed(x):
    return REPLAYED[x["arrival"].astype(int) % 2, np.minimum(x["generated"].astype(int) - 1, 2)]


def sum_of_raised(x):
    return sum(np.maximum(x[name], 1.0) for name in ("entropy", "entropy_low", "entropy_high"))


def at_ticks(x):
    """Every 1.5 nats of the sum of falls since the last selection, and after four tokens."""
    time, at, last, rows = np.zeros(SEQUENCES), np.zeros(SEQUENCES), np.zeros(SEQUENCES), []
    for t, fall in enumerate(np.maximum(0, falls(x)), start=1):
        time = time + fall
        again = (time - at >= 1.5) | (t - last >= 4)
        at, last = np.where(again, time, at), np.where(again, t, last)
        rows.append(again)
    return np.stack(rows)


MIROSTAT = temperature.Mirostat2(3.0, 0.2)
HELD = guards.Clipped(temperature.Mirostat2(3.0, 1.0), "surprisal_cap", 1.0, 5.0)
PAPER = tolerance.EntropyThreshold(0.3, 2.0)
# law: the field, its value before the first token, and those after every token
LAWS = {
    clock.FallClock(): ("entropic_time", 0.0, lambda x: np.maximum(0, falls(x)).cumsum(0)),
    clock.FallClock(0.25): ("entropic_time", 0.0, lambda x: np.maximum(0, falls(x) - 0.5).cumsum(0)),
    clock.RecordClock(): ("entropic_time", 0.0, lambda x: x["entropy"][0] - np.minimum.accumulate(x["entropy"])),
    clock.ChainRuleClock(): ("entropic_time", 0.0, lambda x: x["entropy"].cumsum(0)),
    clock.ChainRuleClock(realised=True): ("entropic_time", 0.0, lambda x: x["surprisal"].cumsum(0)),
    EmaEntropy(0.9): ("entropy", 7.0, filtered(0.9)),  # what the slot held before does not count
    EmaEntropy(0.0): ("entropy", 7.0, lambda x: x["entropy"]),
    temperature.Fixed(): ("temperature", 3.0, lambda x: np.full_like(x["entropy"], 3.0)),
    temperature.Thermostat(2.0, 0.05, 0.5, 1.5): (
        "temperature",
        1.0,
        loop(1.0, lambda last, tempered_entropy, **_: cooled(last, 0.05, tempered_entropy)),
    ),
    temperature.DampedThermostat(2.0, 0.5, 1.0, 0.5, 1.5): (
        "temperature",
        1.0,
        loop(
            1.0,
            lambda last, tempered_entropy, tempered_varentropy, **_: cooled(
                last, np.minimum(0.5, 1 / np.maximum(tempered_varentropy, 1.0)), tempered_entropy
            ),
        ),
    ),
    MIROSTAT: ("surprisal_cap", 6.0, lambda x: 6.0 - 0.2 * (x["surprisal"] - 3.0).cumsum(0)),
    HELD: ("surprisal_cap", 5.0, loop(5.0, lambda last, surprisal, **_: np.clip(last - (surprisal - 3.0), 1.0, 5.0))),
    guards.RateLimited(follow, "temperature", rise=0.5, fall=2.0): (
        "temperature",
        3.0,
        loop(3.0, lambda last, entropy, **_: np.clip(entropy, last - 2.0, last + 0.5)),
    ),
    guards.NeverAboveStart(follow, "temperature"): ("temperature", 3.0, lambda x: np.minimum(x["entropy"], 3.0)),
    guards.Floored(follow, 1.0): ("tolerance", 0.0, sum_of_raised),
    PAPER: ("tolerance", 0.0, lambda x: 0.3 * np.clip(1 - x["entropy"] / 2.0, 0, 1)),
    tolerance.EntropyTolerance(varentropy_limit=9.0, least_margin=0.3): ("tolerance", 1e-3, loop(1e-3, tolerated)),
    tolerance.Constant(0.02): ("tolerance", 0.02, lambda x: np.full_like(x["entropy"], 0.02)),
    refresh.Every(3): ("refresh", True, lambda x: x["generated"] % 3 == 0),
    chain(clock.FallClock(), refresh.EntropicTime(1.5, 4)): ("refresh", True, at_ticks),
    tolerance.Shuffled(REPLAYED, first=0.7): ("tolerance", 0.7, replayed),
}


@pytest.fixture(scope="module")
def observed():
    """Signals "t s" of sequences from certain to doubtful, that differ in everything a law reads."""
    rng = np.random.default_rng(0)

    def up_to(most):
        return most * rng.uniform(size=(TOKENS, SEQUENCES))

    entropy = up_to(np.array([0.2, 1.0, 3.0, 6.0, 12.0, 0.0]))
    entropy[1, 4] = entropy[0, 4]
    drawn = {
        "entropy": entropy,
        "entropy_low": 0.5 * entropy,
        "entropy_high": 1.5 * entropy,
        "varentropy": up_to(12.0),
        "margin": up_to(1.0),
        "surprisal": up_to(8.0),
        "tempered_entropy": up_to(np.array([1.0, 2.0, 4.0, 6.0, 12.0, 0.0])),
        "tempered_varentropy": up_to(6.0),
        "generated": np.arange(1.0, TOKENS + 1)[:, None] + np.zeros(SEQUENCES),
        "arrival": np.arange(7.0, 7 + SEQUENCES) + np.zeros((TOKENS, 1)),
    }
    return {name: np.float64(np.float32(x)) for name, x in drawn.items()}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_a_law_is_its_formula_for_every_sequence_of_a_batch(signals, state, run, observed, law):
    field, first, expected = LAWS[law]
    start = state(law, shape=(SEQUENCES,), temperature=3.0 if first == 3.0 else 1.0, entropy=7.0)
    np.testing.assert_array_equal(getattr(start, field), np.float32(first))
    after = run(law, start, signals(**observed))
    np.testing.assert_allclose(getattr(after, field), expected(observed), rtol=1e-5, atol=2e-6)


def test_a_clock_beside_another_leaves_it_alone(signals, state, run):
    pair = chain(clock.FallClock(), clock.Beside(clock.RecordClock(), "second_clock"))
    states = run(pair, state(pair), signals(entropy=np.array([3, 1, 2, 0.5], np.float32)))
    np.testing.assert_allclose(states.entropic_time, [0, 2, 2, 3.5])
    np.testing.assert_allclose(states.records["second_clock"].entropic_time, [0, 2, 2, 2.5])


def test_counting_guards_count_tokens_and_events_and_start_the_law_within(signals, state, run):
    law = chain(
        clock.FallClock(),
        guards.Saturation(guards.Stability(follow, gain=0.5), "temperature", 0.5, 2.0),
        guards.RateLimited(tolerance.Constant(0.3), "tolerance", 0.1),
        guards.NeverAboveStart(MIROSTAT, "priority"),
    )
    start = state(law)
    np.testing.assert_allclose([start.tolerance, start.surprisal_cap], [0.3, 6.0])
    assert guards.rate(start, "temperature_saturation") == 0
    seen = signals(entropy=np.array([0.5, 1.0, 2.0, 3.0]), tempered_varentropy=np.array([3.9, 4.0, 9.0, 0.0]))
    found = guards.rates(run(law, start, seen))
    assert set(found) == {"temperature_saturation", "stability"}
    np.testing.assert_allclose(found["temperature_saturation"], [1, 1 / 2, 2 / 3, 3 / 4])
    np.testing.assert_allclose(found["stability"], [0, 1 / 2, 2 / 3, 1 / 2])


# Priorities.


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
    records = run(DRIFT, state(DRIFT), signals(entropy=h)).records["entropy_drift"]
    means, variances = [0.0], [0.25]
    for fall in -np.diff(h):
        old = means[-1]
        means.append(0.8 * old + 0.2 * fall)
        variances.append(0.8 * (variances[-1] + old**2) + 0.2 * fall**2 - means[-1] ** 2)
    np.testing.assert_allclose(records.mean, means, rtol=1e-5)
    np.testing.assert_allclose(records.variance, variances, rtol=1e-4)


def test_paper_priorities_by_hand(signals, state):
    start = state(DRIFT)  # mean 0, deviation 1/2: E = deviation / sqrt(2 pi)
    seen = signals(cost=4e6, allocated_pages=3, urgency=0.25)
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

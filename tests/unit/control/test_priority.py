"""Priority: the formulas, and the wait that aging can never exceed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import priority
from et_jax.control.base import chain
from et_jax.types import replace

quick = settings(max_examples=30, deadline=None)


@quick
@given(mean=st.floats(-4, 4), deviation=st.floats(0.05, 3))
def test_expected_fall_is_the_mean_of_the_positive_part(mean, deviation):
    x = np.linspace(mean - 12 * deviation, mean + 12 * deviation, 200_001)
    density = np.exp(-((x - mean) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))
    expected = (np.maximum(x, 0) * density).sum() * (x[1] - x[0])
    got = priority.expected_fall(jnp.float32(mean), jnp.float32(deviation))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-6)


def test_expected_fall_without_spread_is_the_positive_mean():
    got = priority.expected_fall(jnp.asarray([-1.0, 0.0, 2.0]), jnp.zeros(3))
    np.testing.assert_array_equal(got, [0.0, 0.0, 2.0])
    assert priority.expected_fall(jnp.float32(0.0), jnp.float32(0.1)) > 0


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


def test_paper_priorities_by_hand(signals, state, run):
    start = state(DRIFT)  # mean 0, deviation 1/2: E = deviation / sqrt(2 pi)
    seen = signals(cost=4e6, pages_held=3, urgency=0.25)
    fall = 0.5 / np.sqrt(2 * np.pi)
    linear = priority.LinearPriority(fall=2.0, cost=1e-7, memory=0.01, urgency=3.0)
    np.testing.assert_allclose(linear(seen, start), 2 * fall - 0.4 - 0.03 + 0.75, rtol=1e-5)
    ratio = priority.RatioPriority(fall=2.0, memory=1e6, urgency=3.0)
    np.testing.assert_allclose(ratio(seen, start), 2 * fall / 7e6 + 0.75, rtol=1e-6)
    new = priority.RatioPriority()(signals(cost=0.0), start)
    np.testing.assert_allclose(new, fall, rtol=1e-5)


def test_a_priority_without_its_law_says_so(signals, state):
    with pytest.raises(ValueError, match="add the law EntropyDrift"):
        priority.LinearPriority()(signals(cost=0.0), state())


def test_orders(signals, state):
    rows = signals(arrival=np.array([4, 2, 9]), remaining=np.array([100_000, 7, 99_999]))
    first = jax.vmap(priority.FCFS())(rows, state(shape=(3,)))
    short = jax.vmap(priority.SRPT())(rows, state(shape=(3,)))
    np.testing.assert_array_equal(np.argsort(-first), [1, 0, 2])
    np.testing.assert_array_equal(np.argsort(-short), [1, 2, 0])
    assert np.all((short > 0) & (short <= 1))


def test_least_attained_serves_the_fewest_tokens_first(signals, state):
    """Whatever is still allowed and however late it came; even where counts are large and differ by one."""
    generated = np.array([5, 0, 3, 4_000, 3_999])
    rows = signals(generated=generated, arrival=np.array([0, 4, 3, 1, 2]), remaining=np.array([1, 9, 900, 2, 7]))
    score = jax.vmap(priority.LeastAttained())(rows, state(shape=(5,)))
    np.testing.assert_array_equal(np.argsort(-score), np.argsort(generated))
    assert np.all((score > 0) & (score <= 1))


SLOTS = 7


def longest_wait(score, num_runnable, served, steps, choose):
    """Serve the `served` best of `num_runnable` for `steps` steps, ties to the higher slot; slot 0's longest wait.

    `choose(step, wait)` gives the raw priorities and which sequences a newcomer replaces before the step.
    """
    wait, longest = np.zeros(SLOTS, np.int64), 0
    for step in range(steps):
        raw, new = choose(step, wait)
        wait = np.where(new, 0, wait)
        scores = np.where(np.arange(SLOTS) < num_runnable, score(raw, wait), -np.inf)
        best = np.lexsort((-np.arange(SLOTS), -scores))[:served]
        wait = wait + 1
        wait[best] = 0
        longest = max(longest, int(wait[0]))
    return longest


@pytest.fixture(scope="module")
def scored(signals, state):
    """Return a function that gives the aged scores of every slot, the raw priorities carried by `urgency`."""
    compiled = {}

    def of(ceiling, rate):
        if (ceiling, rate) not in compiled:
            rule = priority.Aged(lambda s, _: s.urgency, ceiling, rate)

            def whole(raw, wait):
                return jax.vmap(rule)(signals(urgency=raw), state(shape=(SLOTS,), wait=wait))

            compiled[ceiling, rate] = jax.jit(whole)
        fast = compiled[ceiling, rate]
        return lambda raw, wait: np.asarray(fast(raw.astype(np.float32), wait.astype(np.int32)))

    return of


SETTINGS = [(1.0, 0.1), (0.3, 0.1), (2.0, 1.0), (5.0, 0.37), (0.5, 3.0)]


@pytest.mark.parametrize(("ceiling", "rate"), SETTINGS)
@settings(max_examples=12, deadline=None)
@given(
    num_runnable=st.integers(1, SLOTS),
    served=st.integers(1, 3),
    seed=st.integers(0, 10_000),
    churn=st.floats(0, 0.5),
    lucky=st.floats(0, 1),
)
def test_nobody_waits_longer_than_the_aging_bound(scored, ceiling, rate, num_runnable, served, seed, churn, lucky):
    """The adversary scores the victim below 0, others beyond any ceiling, and sends newcomers at will."""
    rng = np.random.default_rng(seed)

    def choose(step, wait):
        raw = np.where(rng.uniform(size=SLOTS) < lucky, 1e6, rng.uniform(-2, 2, size=SLOTS) * ceiling)
        raw[0] = -1e6
        new = rng.uniform(size=SLOTS) < churn
        new[0] = False
        return raw, new

    bound = priority.waiting_bound(ceiling, rate, num_runnable, served)
    assert longest_wait(scored(ceiling, rate), num_runnable, served, 3 * bound + 10, choose) <= bound


@pytest.mark.parametrize(("ceiling", "rate"), SETTINGS)
def test_the_aging_bound_is_nearly_reached(scored, ceiling, rate):
    """Against others always at the ceiling the victim is passed until a w > R, then once by all but the last served."""
    raw = np.where(np.arange(SLOTS) == 0, -1e6, 1e6)
    longest = longest_wait(scored(ceiling, rate), SLOTS, 1, 200, lambda *_: (raw, np.zeros(SLOTS, bool)))
    bound = priority.waiting_bound(ceiling, rate, SLOTS, 1)
    assert bound - 2 <= longest <= bound - 1


@pytest.mark.parametrize(
    ("ceiling", "rate", "num_runnable", "served", "bound"),
    [(1.0, 0.1, 7, 1, 17), (0.3, 0.1, 7, 2, 7), (2.0, 1.0, 1, 3, 3), (5.0, 0.37, 9, 4, 16), (0.5, 3.0, 2, 1, 2)],
)
def test_the_aging_bound_by_hand(ceiling, rate, num_runnable, served, bound):
    assert priority.waiting_bound(ceiling, rate, num_runnable, served) == bound


def test_without_aging_the_papers_priority_starves(signals, state, run):
    """A sequence that has settled is never served while others still fall, however long it waits."""
    law = chain(DRIFT)
    settled = run(law, state(law), signals(entropy=np.full(60, 0.1)))
    lively = run(law, state(law), signals(entropy=np.tile([3.0, 0.0], 30)))
    last = [jax.tree.map(lambda x: x[-1], states) for states in (settled, lively)]
    rule = priority.LinearPriority()
    waiting = replace(last[0], wait=jnp.int32(10**6))
    seen = signals(cost=0.0)
    assert rule(seen, waiting) < rule(seen, last[1])
    aged = priority.Aged(rule, ceiling=2.0, rate=0.1)
    assert aged(seen, waiting) > aged(seen, last[1])

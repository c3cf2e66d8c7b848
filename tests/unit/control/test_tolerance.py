"""Tolerance: each law against its formula, from the first token on."""

import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import guards, tolerance

ENTROPIES = hnp.arrays(np.float32, 24, elements=st.floats(0, 6, width=32))
PAPER = tolerance.EntropyThreshold(0.3, 2.0)
ENTROPY = tolerance.EntropyTolerance(varentropy_limit=9.0)
FLOORED = guards.Floored(PAPER, 1.5)
quick = settings(max_examples=30, deadline=None)


@quick
@given(entropies=ENTROPIES)
def test_paper_threshold_falls_linearly_with_entropy(signals, state, run, entropies):
    start = state(PAPER, tolerance=0.7)
    assert start.tolerance == 0
    got = run(PAPER, start, signals(entropy=entropies)).tolerance
    np.testing.assert_allclose(got, 0.3 * np.clip(1 - entropies / 2.0, 0, 1), atol=1e-6)


@quick
@given(entropies=ENTROPIES)
def test_a_floor_keeps_low_entropies_from_counting(signals, state, run, entropies):
    got = run(FLOORED, state(FLOORED), signals(entropy=entropies)).tolerance
    np.testing.assert_allclose(got, 0.3 * np.clip(1 - np.maximum(entropies, 1.5) / 2.0, 0, 1), atol=1e-6)


@quick
@given(entropies=ENTROPIES, varentropies=hnp.arrays(np.float32, 24, elements=st.floats(0, 12, width=32)))
def test_entropy_sets_the_tolerance_and_loosens_slowly(signals, state, run, entropies, varentropies):
    start = state(ENTROPY)
    seen = signals(entropy_high=entropies, entropy=0.0, varentropy=varentropies)
    got = np.asarray(run(ENTROPY, start, seen).tolerance, np.float64)
    certainty = np.clip((2.0 - np.maximum(entropies.astype(np.float64), 0.1)) / 1.9, 0, 1)
    certainty = np.where(varentropies > 9.0, 0.0, certainty)
    wanted = np.exp((1 - certainty) * np.log(1e-3) + certainty * np.log(5e-2))
    last = float(start.tolerance)
    for t in range(len(got)):
        np.testing.assert_allclose(got[t], min(wanted[t], 1.25 * last), rtol=1e-4)
        last = got[t]
    assert np.all((got >= 1e-3 * (1 - 1e-5)) & (got <= 5e-2 * (1 + 1e-5)))


def test_a_narrow_lead_counts_as_doubt(signals, state, run):
    law = tolerance.EntropyTolerance(rise=np.inf, least_margin=0.5)
    got = run(law, state(law), signals(entropy_high=np.zeros(2), margin=np.array([0.4, 0.6]))).tolerance
    np.testing.assert_allclose(got, [1e-3, 5e-2], rtol=1e-5)


def test_constant_stays(signals, state, run):
    law = tolerance.Constant(0.02)
    np.testing.assert_allclose(run(law, state(law), signals(entropy=np.arange(3.0))).tolerance, 0.02)


def test_shuffled_replays_by_tokens_generated_whatever_the_entropy(signals, state, run):
    given = np.array([[0.3, 0.1, 0.2], [0.6, 0.4, 0.5]], np.float32)
    law = tolerance.Shuffled(jnp.asarray(given), first=0.7)
    start = state(law, shape=(2,))
    np.testing.assert_array_equal(start.tolerance, np.float32([0.7, 0.7]))
    generated = np.array([[1, 2], [2, 3], [3, 4]])  # the second sequence is one token ahead
    seen = signals(generated=generated, arrival=np.array([[2, 5]] * 3), entropy=np.full((3, 2), 9.0))
    got = run(law, start, seen).tolerance
    np.testing.assert_array_equal(got, np.array([[0.3, 0.4], [0.1, 0.5], [0.2, 0.5]], dtype=np.float32))

"""What steps take by the clock: work counted by hand, times that made the seconds found again, laws told of them."""

import dataclasses

import numpy as np
import pytest

from et_jax.control.draft import AcceptanceLength, PastDrafts, RooflineLength, StepTimes
from et_jax.decode.draft import Drafting, Pruned, lookup
from et_jax.serve import step_clock
from et_jax.serve.step_clock import Fit, fitted, saved, told, work

SELF = Drafting(most=12, length=RooflineLength(StepTimes(*[1.0] * 6)), drafter=Pruned())
TRUE = StepTimes(plain=0.03, plain_cached=1e-5, drafted=0.025, drafted_cached=1e-6, row=2e-3, row_cached=1e-6)
ROUGH = StepTimes(plain=1.2, plain_cached=6e-4, drafted=1.2, drafted_cached=5e-5, row=0.1, row_cached=1e-4)


def numbers(times: StepTimes) -> np.ndarray:
    return np.array(dataclasses.astuple(times))


def test_what_a_step_does_is_counted():
    """Of two slots, batch 2: plain; three tokens drafted of one, in four rows each; nothing but the second served."""
    drafted, held = np.array([[0, 0], [3, 0], [0, 12]]), np.array([[100, 50], [101, 51], [0, 52]])
    found = work(SELF, 2, drafted, np.array([0, 3, 12]), held)
    assert found.tolist() == [
        [1, 150, 0, 0, 0, 0],
        [1, 152, 3, 3 * 101, 8, 4 * 152],
        [1, 52, 12, 12 * 52, 24, 12 * 52],
    ]
    by_lookup = work(Drafting(most=8, drafter=lookup), 2, np.array([[1, 2], [8, 8]]), np.zeros(2, int), held[:2])
    assert by_lookup.tolist() == [[1, 150, 0, 0, 4, 2 * 150], [1, 152, 0, 0, 16, 8 * 152]]


def bursts(num: int, seed: int = 0) -> np.ndarray:
    """Bursts of one to four steps that drafted none, four, eight or twelve tokens, at many contexts."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(num):
        steps = rng.integers(1, 5)
        drafted = rng.choice([0, 0, 4, 8, 12], steps)
        held = np.stack([rng.integers(500, 40_000, steps), np.zeros(steps, int)], axis=1)
        found.append(work(SELF, 2, np.stack([drafted, 0 * drafted], axis=1), drafted, held).sum(axis=0))
    return np.array(found)


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_times_that_made_the_seconds_are_found_again(noise):
    """From rough ones that are off by factors of two; with noise, and one burst of ten held up threefold."""
    done, rng = bursts(256), np.random.default_rng(1)
    seconds = done @ numbers(TRUE) * np.exp(noise * rng.normal(size=256))
    seconds *= np.where(noise and np.arange(256) % 10 == 0, 3.0, 1.0)
    fit = fitted(ROUGH, done, seconds)
    new = bursts(64, seed=2)
    off = new @ numbers(fit.times) / (new @ numbers(TRUE)) - 1.0
    assert np.abs(off).max() < (0.06 if noise else 0.01)


def test_what_was_never_done_is_as_it_was_roughly_and_doubted():
    """Plain steps alone are measured: the others keep their ratio to what the plain ones were taken for."""
    done = work(SELF, 2, np.zeros((40, 2), int), np.zeros(40, int), np.full((40, 2), [8000, 0]))
    seconds = done @ numbers(TRUE)
    fit = fitted(ROUGH, done, seconds)
    plain, short = (work(SELF, 2, np.array([[n, 0]]), np.array([n]), np.array([[8000, 0]]))[0] for n in (0, 4))
    assert plain @ numbers(fit.times) == pytest.approx(plain @ numbers(TRUE), rel=1e-3)
    expected = short @ numbers(ROUGH) / (plain @ numbers(ROUGH))
    assert short @ numbers(fit.times) / (plain @ numbers(fit.times)) == pytest.approx(expected, rel=1e-3)
    before = fit.doubt(plain, short)
    everything = np.concatenate([done, np.tile(short, (20, 1))])
    after = fitted(ROUGH, everything, everything @ numbers(TRUE)).doubt(plain, short)
    assert 0.08 < before < 0.3 and after < 0.02


def test_no_time_is_below_nothing():
    """Rows are free, and the noise would have them give time back."""
    done, free = bursts(64), dataclasses.replace(TRUE, row=0.0, row_cached=0.0)
    rng = np.random.default_rng(5)
    fit = fitted(ROUGH, done, done @ numbers(free) * np.exp(0.05 * rng.normal(size=64)) - 1e-4 * done[:, 4])
    assert numbers(fit.times).min() >= 0.0 and np.isfinite(fit.covariance).all()


def test_laws_are_told_of_sequences_alike():
    fit = Fit(times=TRUE, covariance=np.zeros((6, 6)))
    before = Drafting(most=12, length=AcceptanceLength(0.1, widths=(4.0, 8.0, 12.0)), drafter=lookup)
    past = PastDrafts(acceptance=0.4, credit=1.5)
    own, first = told(dataclasses.replace(SELF, before=before), 4, fit, 3.0, 1000.0, past)
    assert own == RooflineLength(TRUE.alike(3.0, 4.0), 1.02, past=past)
    assert isinstance(first, AcceptanceLength)
    # of each of the three sequences 2e-3 x 4 rows and 1e-6 x 3000 tokens met, over 0.03 + 1e-5 x 3000
    assert first.row_cost == pytest.approx((8e-3 + 3e-3) / 0.06)


def test_a_doubted_speed_has_to_be_greater():
    fit = Fit(times=TRUE, covariance=0.09 * np.eye(6))
    [own] = told(SELF, 2, fit, 1.0, 16_000.0, PastDrafts())
    # shares of a plain step's 0.19 and of a short draft's 0.19 + 0.1 + 0.064 + 0.016 + 0.064, part by part
    plain = np.array([0.03, 0.16, 0, 0, 0, 0]) / 0.19
    short = np.array([0.03, 0.16, 0.1, 0.064, 0.016, 0.064]) / 0.434
    assert isinstance(own, RooflineLength)
    assert own.worth == pytest.approx(step_clock.GAIN + 0.3 * np.linalg.norm(short - plain))


def test_what_drafts_saved_is_what_they_brought_less_what_they_took():
    """Of two steps one drafts four tokens, three of which hold: three plain steps less its passes and rows."""
    held = np.array([[1000, 0], [1001, 0]])
    done, plain = (
        work(SELF, 2, np.array([[0, 0], [count, 0]]), np.array([0, count]), held).sum(axis=0) for count in (4, 0)
    )
    took = 4 * (0.025 + 1e-6 * 1001) + 8 * 2e-3 + 4 * 1e-6 * 1001
    expected = 3.0 - took / (0.03 + 1e-5 * 1000.5)
    assert saved(TRUE, 2, done, plain, 3.0) == pytest.approx(expected)
    assert saved(TRUE, 2, plain, plain, 0.0) == 0.0

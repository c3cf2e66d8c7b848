"""What steps take by the clock: work counted by hand, times that made the seconds found again, laws told of them."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_model import configuration

from et_jax.control.draft import FIRST_CREDIT, DraftLength, PastDrafts, StepTimes
from et_jax.control.draft_speed import AcceptanceLength, RooflineLength
from et_jax.decode.config import Variant
from et_jax.decode.drafting.drafts import Drafting, Pruned, lookup
from et_jax.decode.output import StepOutput
from et_jax.serve.clocks import step_clock
from et_jax.serve.clocks.past_drafts import FORGOTTEN, MOST_SAVED, DraftRecord
from et_jax.serve.clocks.step_clock import Fit, StepClock, fitted, fitted_laws, saved, work

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


@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.01), (0.1, 0.06)])
def test_times_that_made_the_seconds_are_found_again(noise, most):
    """From rough ones that are off by factors of two; with noise, and one burst of ten held up threefold."""
    done, rng = bursts(256), np.random.default_rng(1)
    seconds = done @ numbers(TRUE) * np.exp(noise * rng.normal(size=256))
    seconds *= np.where(noise and np.arange(256) % 10 == 0, 3.0, 1.0)
    new = bursts(64, seed=2)
    off = new @ numbers(fitted(ROUGH, done, seconds).times) / (new @ numbers(TRUE)) - 1.0
    assert np.abs(off).max() < most


def test_no_time_is_below_0():
    """As if drafts gave time back."""
    done = bursts(256)
    fit = fitted(ROUGH, done, done @ numbers(dataclasses.replace(TRUE, drafted=-0.01)))
    assert numbers(fit.times).min() == 0.0 and np.isfinite(fit.covariance).all()


def test_laws_are_told_of_sequences_alike_and_a_doubted_speed_has_to_be_greater():
    fit = Fit(times=TRUE, covariance=np.zeros((6, 6)))
    before = Drafting(most=12, length=AcceptanceLength(0.1, widths=(4.0, 8.0, 12.0)), drafter=lookup)
    past = PastDrafts(acceptance=0.4, credit=1.5)
    own, first = fitted_laws(dataclasses.replace(SELF, before=before), 4, fit, 3.0, 1000.0, past)
    assert own == RooflineLength(TRUE.alike(3.0, 4.0), 1.02, past=dataclasses.replace(past, several=1.0))
    assert isinstance(first, AcceptanceLength)
    # of each of the three sequences 2e-3 x 4 rows and 1e-6 x 3000 tokens met, over 0.03 + 1e-5 x 3000
    assert first.row_cost == pytest.approx((8e-3 + 3e-3) / 0.06)
    [own] = fitted_laws(SELF, 2, Fit(times=TRUE, covariance=0.09 * np.eye(6)), 1.0, 16_000.0, PastDrafts())
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


def test_how_drafts_fared_is_counted_and_forgotten():
    """Of 6 tried 3 were accepted, beside 3.6 of 4 supposed; after a thousand steps more they count for half."""
    record = DraftRecord()
    assert record.past() == PastDrafts()
    record.record(10, verified=6, accepted=3, saved=-0.5)
    told = record.past()
    assert told.acceptance == pytest.approx(6.6 / 10) and told.credit == pytest.approx(FIRST_CREDIT - 0.5 + 0.1)
    record.record(int(FORGOTTEN), verified=0, accepted=0, saved=0.0)
    assert record.past().acceptance == pytest.approx(5.1 / 7) and record.past().credit == MOST_SAVED


CONFIG = configuration(draft=Drafting(most=12, length=SELF.length, drafter=Pruned(), times=ROUGH))
WHOLE, PLAIN_ONE = CONFIG.full_variant, CONFIG.full_variant._replace(drafts=False)


def output(drafted: int, accepted: int, steps: int) -> StepOutput:
    """That of steps in which the first sequence, of 800 tokens, drafted so many tokens and so many were accepted."""
    first, slots = np.arange(CONFIG.num_slots) == 0, (steps, 1, CONFIG.num_slots)

    def of_first(value: Any) -> np.ndarray:
        return np.broadcast_to(np.where(first, value, 0), slots)

    made = object.__new__(StepOutput)
    signals = SimpleNamespace(length=of_first(800), allocated_pages=of_first(800))
    told = {"produced": of_first(1).astype(bool), "drafted": of_first(drafted), "accepted": of_first(accepted)}
    told |= {"signals": signals, "work": (SimpleNamespace(passes=of_first(1 + drafted)),)}
    vars(made).update(told)
    return made


def worths(*bursts: tuple[int, int, Variant], seconds: float = 1.0) -> list[float | None]:
    """How much a speed has to be worth at first, and after each of the bursts; None where nothing is told of it.

    A burst has the tokens that each of its steps drafts, of which all are accepted, its steps, and its program.
    """
    clock = StepClock(CONFIG)
    told = [clock.record(output(each, each, steps), steps, seconds * steps, one) for each, steps, one in bursts]
    return [worth(clock.begin()), *map(worth, told)]


def worth(laws: tuple[DraftLength, ...] | None) -> float | None:
    if laws is None:
        return None
    assert isinstance(laws[0], RooflineLength)
    return float(laws[0].worth)


def test_a_model_drafts_for_itself_once_plain_steps_are_measured_and_waits_when_they_are_forgotten():
    plain, drafting = (0, 1, PLAIN_ONE), (4, 1, WHOLE)
    *waiting, known = worths(*[plain] * 5)
    assert waiting == [np.inf, None, *[np.inf] * 3] and known is not None and 1.0 < known < 1.5
    told = [one for one in worths(*[plain] * 5, *[drafting] * (step_clock.REMEMBERED + step_clock.EVERY)) if one]
    assert told[-1] == np.inf and told.count(np.inf) < 8


def test_a_burst_says_nothing_that_is_the_first_of_a_program_in_so_many_rows_or_only_notes_what_was_read():
    short, long, noting = (4, 1, WHOLE), (12, 1, WHOLE), (0, 1, WHOLE)
    _, *told = worths(*[(0, 4, PLAIN_ONE)] * 2, short, short, long, noting, noting, long)
    assert [one is not None for one in told] == [False, True, False, True, False, False, False, True]

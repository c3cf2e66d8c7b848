"""Measures step times for the draft laws; no sequence's tokens depend on them.

The model of a burst's time is the counts of `work` times the `StepTimes`. The times are fitted to the last bursts, with
rough estimates as the prior, so that work that was never done still has an expected time. The spread of bursts about
the fit gives the uncertainty of a speed. Steps with drafts do not determine the time of a draft by themselves, so a
model that drafts for itself first waits for a few plain steps, and again when those are forgotten. The draft laws of
new sequences also receive the time that drafts saved, and how many were accepted (`past_drafts`).
"""

import collections
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from et_jax.control.draft import SHORT, DraftLength, PastDrafts, StepTimes
from et_jax.decode.config import DecoderConfig, Variant
from et_jax.decode.drafting.drafts import Drafting
from et_jax.decode.output import StepOutput
from et_jax.serve.clocks.past_drafts import DraftRecord

REMEMBERED = 256  # bursts
EVERY = 8  # bursts between two fits; while a kind of burst has at most this many, each is fitted at once
PLAIN = 4  # the fewest steps without drafts that determine the time of a step
DOUBT = 0.3  # relative standard deviation of a rough time
LEAST_SPREAD = 0.02  # of a burst's time, relative to the expected time
GAIN = 1.02  # the least speed-up over plain decoding at which tokens are drafted
ROUNDS = 6  # iterations of Huber reweighting
FAR = 2.0  # spreads beyond which a burst has less weight: something else ran concurrently
_NAMES = [field.name for field in dataclasses.fields(StepTimes)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """`times` in seconds; `covariance` is that of the relative errors of the times, `[6, 6]`."""

    times: StepTimes
    covariance: Float[np.ndarray, "f f"]

    def doubt(self, plain: Float[np.ndarray, " f"], drafting: Float[np.ndarray, " f"]) -> float:
        """Return the standard deviation of the log of the ratio of the times of two kinds of work."""
        each = np.array([getattr(self.times, name) for name in _NAMES])
        parts = [work * each / (work @ each) for work in (drafting, plain)]
        return float(np.sqrt(max((parts[0] - parts[1]) @ self.covariance @ (parts[0] - parts[1]), 0.0)))


def work(
    drafting: Drafting,
    batch: int,
    drafted: Int[np.ndarray, "n b"],
    passes: Int[np.ndarray, " n"],
    lengths: Int[np.ndarray, "n b"] | Float[np.ndarray, "n b"],
) -> Float[np.ndarray, "n f"]:
    """Return how often each of the `StepTimes` occurs in every step.

    A step has `drafted` tokens per slot in `passes` draft passes; `lengths` is the cached tokens per slot, 0 for slots
    that the step did not decode.
    """
    widths = np.array(drafting.widths(batch))
    rows = widths[np.searchsorted(widths, drafting.needed(batch, drafted))] - batch
    cached, ahead = lengths.sum(axis=1), passes * (lengths * (drafted > 0)).sum(axis=1)
    return np.stack([np.ones(len(rows)), cached, passes, ahead, rows, rows / batch * cached], axis=1).astype(np.float64)


def fitted(rough: StepTimes, done: Float[np.ndarray, "n f"], seconds: Float[np.ndarray, " n"]) -> Fit:
    """Return the times fitted to the work `done` in every burst and the `seconds` that it took.

    These are the posterior mean and covariance of a linear model with errors in proportion to the expected time. The
    prior of each time is the rough one, scaled by a common factor, with relative standard deviation `DOUBT`. Outliers
    have less weight (Huber's weights), and no time is below 0.
    """
    prior = np.array([getattr(rough, name) for name in _NAMES])
    prior *= np.median(seconds / (done @ prior))
    parts = done * prior  # so that the unknowns are the ratios to the rough times
    found, free = np.ones(len(prior)), prior > 0
    for _ in range(ROUNDS):
        expected = parts @ found
        relative, target = parts / expected[:, None], seconds / expected
        off = np.abs(target - 1.0)
        spread = max(LEAST_SPREAD, 1.4826 * float(np.median(off)))
        weight = np.minimum(1.0, FAR * spread / np.maximum(off, 1e-12)) / spread**2
        precision = (relative * weight[:, None]).T @ relative + np.eye(len(prior)) / DOUBT**2
        found, free = _above_zero(precision, relative.T @ (weight * target) + 1.0 / DOUBT**2, prior > 0)
    covariance = np.zeros_like(precision)
    covariance[np.ix_(free, free)] = np.linalg.inv(precision[np.ix_(free, free)])
    covariance /= np.outer(*[np.where(free, found, 1.0)] * 2)
    return Fit(times=StepTimes(**dict(zip(_NAMES, (found * prior).tolist(), strict=True))), covariance=covariance)


def saved(
    times: StepTimes, steps: int, done: Float[np.ndarray, " f"], plain: Float[np.ndarray, " f"], brought: float
) -> float:
    """Return the time that drafts saved in steps with the work `done`, in plain steps; negative if they cost more.

    Without drafts the steps would do the work `plain`. `brought` is the accepted tokens per decoded sequence.
    """
    each = np.array([getattr(times, name) for name in _NAMES])
    return float(brought - steps * ((done - plain) @ each) / (plain @ each))


def _above_zero(
    precision: Float[np.ndarray, "f f"], wanted: Float[np.ndarray, " f"], free: np.ndarray[Any, np.dtype[np.bool_]]
) -> tuple[Float[np.ndarray, " f"], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Solve a least-squares problem in its `free` numbers; numbers that would be negative are fixed at 0."""
    while True:
        found = np.zeros(len(wanted))
        found[free] = np.linalg.solve(precision[np.ix_(free, free)], wanted[free])
        if (found >= 0.0).all():
            return found, free & (found > 0.0)
        free = free & (found > 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Burst:
    """The work `done` by a burst of `steps`, and its time; `plain` is the work of as many steps without drafts.

    `drafts` is True if a model, itself or a small one, drafted in any step. Of the tokens it drafted, `verified` had
    all predecessors accepted and `accepted` were accepted: `brought` tokens per decoded sequence.
    """

    done: Float[np.ndarray, " f"]
    plain: Float[np.ndarray, " f"]
    seconds: float
    steps: int
    drafts: bool
    verified: int
    accepted: int
    brought: float


class StepClock:
    """Records the times of bursts, and fits the draft laws to them; without `Drafting.times` it records nothing."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config, self._drafting = config, config.draft
        self._bursts: collections.deque[_Burst] = collections.deque(maxlen=REMEMBERED)
        self._unfitted, self._past = 0, DraftRecord()
        self._ran: set[tuple[Variant, float]] = set()  # programs, and their rows beyond those of a plain step

    def begin(self) -> tuple[DraftLength, ...] | None:
        """Return the draft laws before any measurement; None if there will be none."""
        if self._drafting is None or self._drafting.times is None:
            return None
        first, *others = self._drafting.laws
        return first.waiting(), *others

    def record(self, output: StepOutput, ran: int, seconds: float, variant: Variant) -> tuple[DraftLength, ...] | None:
        """Record a burst of `ran` steps; every few bursts return newly fitted draft laws, otherwise None.

        While there are few bursts with drafts, or few without, laws are fitted after each of these. A burst is ignored
        if a program ran with a number of rows for the first time, because XLA then initialises it, or if a model that
        drafts for itself, without a lookup, only recorded the blocks it read.
        """
        drafting = self._drafting
        if drafting is None or drafting.times is None or not ran:
            return None
        signals, size = output.signals, self._config.page_size
        produced, drafted, accepted, length, pages = (
            np.asarray(x)[:ran, 0]
            for x in (output.produced, output.drafted, output.accepted, signals.length, signals.allocated_pages)
        )
        served = produced.any(axis=1)
        if not served.all():
            return None
        passes = sum(np.asarray(one.passes)[:ran, 0].max(axis=1) for one in output.work) - 1
        lengths = np.where(produced, np.minimum(length, pages * size), 0)  # a compressed cache has fewer than `length`
        # in steps of a model after a lookup, the lookup may have drafted some of the tokens
        own = np.asarray(passes > 0)
        each = work(drafting, self._config.batch, drafted, passes, lengths)
        new = {(variant, rows) for rows in each[:, _NAMES.index("row")].tolist()} - self._ran
        self._ran |= new
        recording = drafting.pruned is not None and drafting.before is None and variant.drafts and not own.any()
        if new or recording:
            return None
        done = each.sum(axis=0)
        none = np.where(own, 0, drafted.T).T  # in steps where the model drafted
        plain = work(drafting, self._config.batch, none, 0 * passes, lengths).sum(axis=0)
        self._bursts.append(
            _Burst(
                done=done,
                plain=plain,
                seconds=seconds,
                steps=ran,
                drafts=bool(own.any()),
                verified=int(np.minimum(accepted + 1, drafted)[own].sum()),
                accepted=int(accepted[own].sum()),
                brought=float((accepted.sum(axis=1) / produced.sum(axis=1))[own].sum()),
            )
        )
        self._unfitted += 1
        bursts = list(self._bursts)
        alike = sum(one.drafts == bursts[-1].drafts for one in bursts)
        if self._unfitted < EVERY < alike:
            return None
        fit = fitted(drafting.times, np.array([one.done for one in bursts]), np.array([one.seconds for one in bursts]))
        for one in bursts[-self._unfitted :]:
            gain = saved(fit.times, one.steps, one.done, one.plain, one.brought)
            self._past.record(one.steps, one.verified, one.accepted, gain)
        self._unfitted = 0
        sequences = float(produced.sum(axis=1).mean())
        context = float(lengths.sum() / produced.sum())
        first, *others = fitted_laws(drafting, self._config.batch, fit, sequences, context, self._past.past())
        known = sum(one.steps for one in bursts if not one.drafts) >= PLAIN
        return first if known else first.waiting(), *others


def fitted_laws(
    drafting: Drafting, batch: int, fit: Fit, sequences: float, context: float, past: PastDrafts
) -> tuple[DraftLength, ...]:
    """Return the draft laws fitted to measured times, for `sequences` sequences of `context` cached tokens each.

    A law drafts only if the expected speed exceeds that of plain decoding by a standard deviation of its uncertainty.
    """
    alike = np.arange(batch) < round(sequences)
    lengths = np.where(alike, context, 0)[None]
    plain, short = (
        work(drafting, batch, count * alike[None].astype(np.int32), np.array([count]), lengths)[0]
        for count in (0, min(SHORT, drafting.most))
    )
    worth = GAIN + fit.doubt(plain, short)
    past = dataclasses.replace(past, several=float(sequences > 1.0))
    own = fit.times.alike(sequences, batch if drafting.pruned is not None else sequences)
    first, *others = drafting.laws
    before = dataclasses.replace(own, drafted=0.0, drafted_cached=0.0)
    return first.fitted(own, worth, context, past), *(law.fitted(before, worth, context, past) for law in others)

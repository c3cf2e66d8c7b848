"""What steps take by the clock, told to the laws of drafts: no text depends on it.

A burst of steps takes, as it is modelled here, the sum of what `work` counts in it times the `StepTimes`. Those are
fitted to the last bursts, beginning with rough ones that are doubted, so that what was never done is still expected to
take something. The spread of bursts about the fit says how well a speed is known. A few plain steps are always among
them, for by steps that draft alone nobody knows what a draft takes beside one: a model that drafts for itself waits for
them, at first and whenever they are forgotten. What drafts saved by those times, and how many of them were accepted, is
told too, for the texts that begin (`past_drafts`).
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
EVERY = 8  # bursts: how often times are fitted anew; those of a kind of which there are fewer at once
PLAIN = 4  # steps without drafts, fewer than which do not say what one takes
DOUBT = 0.3  # standard deviation of a rough time, over it
LEAST_SPREAD = 0.02  # of a burst's time, over what is expected of it
GAIN = 1.02  # speed over plain decoding's below which nothing is drafted, however well it is known
ROUNDS = 6  # of weighing bursts by how far off they are
FAR = 2.0  # spreads, beyond which a burst counts for less: something else ran beside it
_NAMES = [field.name for field in dataclasses.fields(StepTimes)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """`times` in seconds, as far as they are known: `covariance` is that of each over its value, `[6, 6]`."""

    times: StepTimes
    covariance: Float[np.ndarray, "f f"]

    def doubt(self, plain: Float[np.ndarray, " f"], drafting: Float[np.ndarray, " f"]) -> float:
        """Return the standard deviation of the log of how much longer one kind of work takes than another."""
        each = np.array([getattr(self.times, name) for name in _NAMES])
        parts = [work * each / (work @ each) for work in (drafting, plain)]
        return float(np.sqrt(max((parts[0] - parts[1]) @ self.covariance @ (parts[0] - parts[1]), 0.0)))


def work(
    drafting: Drafting,
    batch: int,
    drafted: Int[np.ndarray, "n b"],
    passes: Int[np.ndarray, " n"],
    held: Int[np.ndarray, "n b"] | Float[np.ndarray, "n b"],
) -> Float[np.ndarray, "n f"]:
    """Return how often each of the `StepTimes` is in every step.

    A step `drafted` so many tokens of every slot in so many `passes`; the sequences that it served `held` so many
    tokens, others 0.
    """
    widths = np.array(drafting.widths(batch))
    rows = widths[np.searchsorted(widths, drafting.needed(batch, drafted))] - batch
    cached, ahead = held.sum(axis=1), passes * (held * (drafted > 0)).sum(axis=1)
    return np.stack([np.ones(len(rows)), cached, passes, ahead, rows, rows / batch * cached], axis=1).astype(np.float64)


def fitted(rough: StepTimes, done: Float[np.ndarray, "n f"], seconds: Float[np.ndarray, " n"]) -> Fit:
    """Return the times by which the work `done` in every burst takes the `seconds` that it took.

    The posterior mean and covariance of a linear model whose errors are in proportion to what is expected: a priori
    each time is the rough one, in one unit for all, give or take `DOUBT` of it. Bursts that are far off count for less
    (Huber's weights), and no time is below 0.
    """
    prior = np.array([getattr(rough, name) for name in _NAMES])
    prior *= np.median(seconds / (done @ prior))
    parts = done * prior  # so that what is sought is each time over the rough one
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
    return Fit(
        times=StepTimes(**dict(zip(_NAMES, (found * prior).tolist(), strict=True))),
        covariance=covariance,
    )


def saved(
    times: StepTimes, steps: int, done: Float[np.ndarray, " f"], plain: Float[np.ndarray, " f"], brought: float
) -> float:
    """Return what drafts saved in so many steps that did the work `done`, in plain steps; below 0 where they cost more.

    Without drafts the steps would do the work `plain`. What held was `brought` of a token for every sequence served.
    """
    each = np.array([getattr(times, name) for name in _NAMES])
    return float(brought - steps * ((done - plain) @ each) / (plain @ each))


def _above_zero(
    precision: Float[np.ndarray, "f f"], wanted: Float[np.ndarray, " f"], free: np.ndarray[Any, np.dtype[np.bool_]]
) -> tuple[Float[np.ndarray, " f"], np.ndarray[Any, np.dtype[np.bool_]]]:
    """The solution of a least-squares problem in its `free` numbers, those that would be below 0 held there."""
    while True:
        found = np.zeros(len(wanted))
        found[free] = np.linalg.solve(precision[np.ix_(free, free)], wanted[free])
        if (found >= 0.0).all():
            return found, free & (found > 0.0)
        free = free & (found > 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Burst:
    """What a burst of `steps` did and how long it took; `plain` is what as many steps without drafts do.

    It `drafts` where the model does for itself, or a small one, in any step. Where the model drafted, so many tokens
    were `tried`, those before them accepted, and so many `accepted`; these come to `brought` of a token for every
    sequence served.
    """

    done: Float[np.ndarray, " f"]
    plain: Float[np.ndarray, " f"]
    seconds: float
    steps: int
    drafts: bool
    tried: int
    accepted: int
    brought: float


class StepClock:
    """Notes what bursts take, and tells the laws of lengths; without `Drafting.times` nothing is noted."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config, self._drafting = config, config.draft
        self._bursts: collections.deque[_Burst] = collections.deque(maxlen=REMEMBERED)
        self._untold, self._record = 0, DraftRecord()
        self._ran: set[tuple[Variant, float]] = set()  # programs, and the rows beside those of a plain step

    def begin(self) -> tuple[DraftLength, ...] | None:
        """Return the laws before anything is noted; None where nothing will be."""
        if self._drafting is None or self._drafting.times is None:
            return None
        first, *others = self._drafting.laws
        return first.waiting(), *others

    def note(self, output: StepOutput, ran: int, seconds: float, variant: Variant) -> tuple[DraftLength, ...] | None:
        """Note a burst of `ran` steps, and return the laws by what is known now, every few bursts; otherwise None.

        While few bursts are known that draft, or few that do not, what one of them says is told at once. A burst says
        nothing in which a program has some number of rows for the first time, for XLA makes ready then what it runs;
        nor one in which a model that alone drafts for itself has only noted what it read.
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
        held = np.where(produced, np.minimum(length, pages * size), 0)  # of a compressed cache less than its text
        # steps; where something is asked for guesses before the model, it may have made some of them
        own = np.asarray(passes > 0)
        each = work(drafting, self._config.batch, drafted, passes, held)
        new = {(variant, rows) for rows in each[:, _NAMES.index("row")].tolist()} - self._ran
        self._ran |= new
        noting = drafting.pruned is not None and drafting.before is None and variant.drafts and not own.any()
        if new or noting:
            return None
        done = each.sum(axis=0)
        none = np.where(own, 0, drafted.T).T  # in steps where the model drafted
        plain = work(drafting, self._config.batch, none, 0 * passes, held).sum(axis=0)
        self._bursts.append(
            _Burst(
                done=done,
                plain=plain,
                seconds=seconds,
                steps=ran,
                drafts=bool(own.any()),
                tried=int(np.minimum(accepted + 1, drafted)[own].sum()),
                accepted=int(accepted[own].sum()),
                brought=float((accepted.sum(axis=1) / produced.sum(axis=1))[own].sum()),
            )
        )
        self._untold += 1
        bursts = list(self._bursts)
        alike = sum(one.drafts == bursts[-1].drafts for one in bursts)
        if self._untold < EVERY < alike:
            return None
        fit = fitted(drafting.times, np.array([one.done for one in bursts]), np.array([one.seconds for one in bursts]))
        for one in bursts[-self._untold :]:
            gain = saved(fit.times, one.steps, one.done, one.plain, one.brought)
            self._record.note(one.steps, one.tried, one.accepted, gain)
        self._untold = 0
        sequences = float(produced.sum(axis=1).mean())
        context = float(held.sum() / produced.sum())
        first, *others = told(drafting, self._config.batch, fit, sequences, context, self._record.told())
        known = sum(one.steps for one in bursts if not one.drafts) >= PLAIN
        return first if known else first.waiting(), *others


def told(
    drafting: Drafting, batch: int, fit: Fit, sequences: float, context: float, past: PastDrafts
) -> tuple[DraftLength, ...]:
    """Return the laws of lengths by measured times, of so many sequences that hold `context` tokens each.

    A speed has to be above plain decoding's by a standard deviation of what is known of it.
    """
    alike = np.arange(batch) < round(sequences)
    held = np.where(alike, context, 0)[None]
    plain, short = (
        work(drafting, batch, count * alike[None].astype(np.int32), np.array([count]), held)[0]
        for count in (0, min(SHORT, drafting.most))
    )
    worth = GAIN + fit.doubt(plain, short)
    past = dataclasses.replace(past, several=float(sequences > 1.0))
    own = fit.times.alike(sequences, batch if drafting.pruned is not None else sequences)
    first, *others = drafting.laws
    before = dataclasses.replace(own, drafted=0.0, drafted_cached=0.0)
    return first.fitted(own, worth, context, past), *(law.fitted(before, worth, context, past) for law in others)

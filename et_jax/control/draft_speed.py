"""Draft length laws that maximise the expected speed, from the costs of rows, passes and the cache."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.draft import MOST_CREDIT, MOST_DRAFTED, SHORT, TRIAL, DraftLength, DraftState, PastDrafts, StepTimes
from et_jax.types import Count, Number, replace, static, value

_LENGTHS = range(MOST_DRAFTED + 1)


def _paid(widths: tuple[float, ...], length: int) -> float:
    """Return the least of the widths that is at least `length`, or `length` itself if all are less."""
    return min((width for width in widths if width >= length > 0), default=float(length))


def _brought(acceptance: Float[Array, ""]) -> Float[Array, " k"]:
    """Return the expected number of new tokens for every draft length, including the model's own token."""
    return jnp.cumsum(acceptance ** jnp.asarray(_LENGTHS, jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Relative costs of the rows of a step on one kind of machine.

    `row` is the time of an extra row over that of reading the weights once; `cached_row` that of an extra row which
    attends to the same sequence's cache, over reading that cache once; `cached` that of a byte of the cache, over a
    byte of the weights. The fixed overhead of a layer per pass equals reading `passing` bytes of the
    weights, and that of one more verified position, in any number of rows, `position` bytes.
    """

    row: float
    cached_row: float
    cached: float
    passing: float
    position: float = 0.0


ON_CPUS = Costs(row=0.1, cached_row=0.2, cached=3.0, passing=1.3e6)
"""A row costs 0.04 by `benchmarks/results/drafting_forced.json`, more if the machine's cache holds the weights.

The others are rough: set from a few timings of the shape of SmolLM-135M on two cores, in bfloat16.
"""

ON_GPUS = Costs(row=0.01, cached_row=0.01, cached=1.0, passing=320e6, position=1.0e9)
"""From single steps of the shape of SmolLM-135M on an H200 (`benchmarks/results/self_drafting-h200.json`).

A layer's two dozen kernels take about 75 microseconds (launch-bound), and a verified position
about 0.25 milliseconds, at 4.2 TB/s.
"""

ON_TPUS = Costs(row=0.01, cached_row=0.01, cached=1.0, passing=0.0)
"""From the rooflines; not measured."""


WORTH = 1.15
"""The least expected speedup at which a model self-drafts before any step is measured."""


@value
class AcceptanceLength(DraftLength):
    """The length of the greatest expected speed if every drafted token is accepted with the running rate p.

        argmax_k (1 + p + ... + p^k) / (1 + c w(k))

    k drafted tokens yield 1 + p + ... + p^k tokens (Leviathan et al. 2023) for an extra c w(k) of a plain step's time;
    c is `row_cost`, and w(k) the least of `widths`, in drafted tokens of a sequence, that is at least k, or k itself
    if none is. A sequence whose best length is 0 drafts again after `retry` steps, to update its rate: the widest
    draft that costs no more than one token.
    """

    row_cost: Number = ON_CPUS.row
    retry: Count = 16
    widths: tuple[float, ...] = static(default=())

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the best length, or that of a trial draft."""
        best, most = self._best(draft.acceptance), draft.most
        again = (best == 0) & (draft.since >= self.retry)
        return jnp.minimum(jnp.where(again, int(self._paid(1)), best), most)

    def fitted(self, times: StepTimes, worth: float, context: float, past: PastDrafts) -> "AcceptanceLength":
        """Return the law with the measured cost of a drafted token.

        Lengths are used from a speedup of 1 on; trial drafts of a failing sequence cost a hundredth of its steps.
        """
        token = times.drafted + times.row + (times.drafted_cached + times.row_cached) * context
        return self.at(float(token / (times.plain + times.plain_cached * context)))

    def at(self, row_cost: float) -> "AcceptanceLength":
        """Return the law with another `row_cost`, and with trial drafts that cost a hundredth of the steps between."""
        law = replace(self, row_cost=row_cost)
        return replace(law, retry=max(16, round(100 * row_cost * law.first)))

    @property
    def first(self) -> int:
        """The best length at the assumed acceptance rate, at least a short one, so that drafting is tried at all."""
        brought = [sum(self.supposed**i for i in range(k + 1)) for k in range(SHORT + 1)]
        speed = [brought[k] / (1 + self.row_cost * self._paid(k)) for k in range(SHORT + 1)]
        return max(range(SHORT + 1), key=speed.__getitem__) or int(self._paid(1))

    def _paid(self, length: int) -> float:
        """Return the drafted tokens that a draft of this length is charged for."""
        return _paid(self.widths, length)

    def _best(self, acceptance: Float[Array, ""]) -> Int[Array, ""]:
        paid = jnp.asarray([self._paid(length) for length in _LENGTHS], jnp.float32)
        return jnp.argmax(_brought(acceptance) / (1.0 + self.row_cost * paid)).astype(jnp.int32)


@value
class RooflineLength(DraftLength):
    """The length of the greatest expected speed for self-drafting, at the current context length.

        argmax_k (1 + p + ... + p^k) / (1 + c(k)),   c(k) = (k drafted + w(k) row) / plain

    p and w(k) are as for `AcceptanceLength`. Each of the three times is a constant for the weights plus a term per
    cached token: `times`, of equal sequences in one batch. A step drafts nothing for a
    short context, or if the expected speedup is below `worth`, because the times are approximate.

    A sequence starts with the acceptance rate and the credit of the `past`. A draft that costs more than the credit
    is not made: all sequences together may lose eight plain steps, one of them
    four, plus a hundredth of their plain steps and whatever they have saved. If drafts would pay at full acceptance but
    are being rejected, one token is drafted again once that costs a hundredth of the steps since.

    Sequences in the same batch use the same draft length, from the acceptance rate and the credit of all sequences: a
    step takes as many passes as its longest draft, so a longer one costs all of them, and a shorter one saves nothing.
    """

    # An average over about the last thirty tokens: the cost of drafts is bounded, and once drafts stop data is rare.
    memory: ClassVar[float] = 0.97

    times: StepTimes
    worth: Number = WORTH
    widths: tuple[float, ...] = static(default=())
    past: PastDrafts = PastDrafts()

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the best length, or one token as a trial."""
        cost, past = self._costs(context), self.past
        alike = jnp.asarray(past.several) > 0
        speed = _brought(jnp.where(alike, past.acceptance, draft.acceptance)) / (1.0 + cost)
        within = cost <= jnp.where(alike, past.credit, jnp.minimum(draft.credit, past.credit))

        def best(speed: Float[Array, " k"]) -> Int[Array, ""]:
            speed = jnp.where(within, speed, 0.0)
            return jnp.where(jnp.max(speed) >= self.worth, jnp.argmax(speed), 0).astype(jnp.int32)

        may_pay = best(_brought(jnp.ones_like(draft.acceptance)) / (1.0 + cost)) > 0
        again = may_pay & (draft.since.astype(jnp.float32) >= cost[1] / TRIAL)
        found = best(speed)
        return jnp.minimum(jnp.where((found == 0) & again, 1, found), draft.most)

    def cost(self, drafted: Int[Array, ""], context: Int[Array, ""]) -> Float[Array, ""]:
        """Return the overhead of a step that drafts so many tokens over a plain step, in plain steps."""
        return self._costs(context)[drafted]

    def fitted(self, times: StepTimes, worth: float, context: float, past: PastDrafts) -> "RooflineLength":
        """Return the law with these measurements."""
        return replace(self, times=times, worth=worth, past=past)

    def waiting(self) -> "RooflineLength":
        """Return the law with an unreachable `worth`."""
        return replace(self, worth=jnp.inf)

    def by_past(self, begun: DraftState) -> DraftState:
        """Return the state of a sequence before its first draft, given the statistics of other sequences."""
        acceptance, credit = self.past.acceptance, self.past.credit
        return replace(
            begun,
            acceptance=jnp.full_like(begun.acceptance, acceptance),
            credit=jnp.full_like(begun.credit, jnp.minimum(credit, MOST_CREDIT)),
        )

    def _costs(self, context: Int[Array, ""]) -> Float[Array, " k"]:
        """Return the overhead of a step for every draft length, in plain steps."""
        cached, times = context.astype(jnp.float32), self.times
        ahead = jnp.asarray(_LENGTHS, jnp.float32)
        rows = jnp.asarray([_paid(self.widths, length) for length in _LENGTHS], jnp.float32)
        drafted = ahead * (times.drafted + times.drafted_cached * cached)
        verified = rows * (times.row + times.row_cached * cached)
        return (drafted + verified) / (times.plain + times.plain_cached * cached)

"""Laws of how many tokens to draft that go by the expected speed: by what rows, passes and the cache cost."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.draft import MOST_CREDIT, MOST_DRAFTED, SHORT, TRIAL, DraftLength, DraftState, PastDrafts, StepTimes
from et_jax.types import Count, Number, replace, static, value

_LENGTHS = range(MOST_DRAFTED + 1)


def _paid(widths: tuple[float, ...], length: int) -> float:
    """The least of the widths that holds a draft of this length, or the length where none does."""
    return min((width for width in widths if width >= length > 0), default=float(length))


def _brought(acceptance: Float[Array, ""]) -> Float[Array, " k"]:
    """The tokens that a draft of every length is expected to bring, that of the model's own with them."""
    return jnp.cumsum(acceptance ** jnp.asarray(_LENGTHS, jnp.float32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What rows of a step cost on a kind of machine.

    `row` is the time of a row beside others, over that of reading the weights once; `cached_row` that of a row which
    meets a sequence's cache beside another, over reading that cache once; `cached` that of a byte of the cache, over a
    byte of the weights. What a layer takes in a pass beside all that is the time of reading `passing` bytes of the
    weights, and what verifying one position more does, in however many rows, that of `position` bytes.
    """

    row: float
    cached_row: float
    cached: float
    passing: float
    position: float = 0.0


ON_CPUS = Costs(row=0.1, cached_row=0.2, cached=3.0, passing=1.3e6)
"""A row costs 0.04 by `benchmarks/results/drafting_forced.json`, more where the machine's cache holds the weights.

The others are rough: chosen by a few timings of the shape of SmolLM-135M on two cores, in bfloat16.
"""

ON_GPUS = Costs(row=0.01, cached_row=0.01, cached=1.0, passing=320e6, position=1.0e9)
"""By single steps of the shape of SmolLM-135M on an H200 (`benchmarks/results/self_drafting-h200.json`).

A layer's two dozen kernels take some 75 microseconds, however little they read, and what is done of a verified position
some 0.25 milliseconds, at 4.2 TB/s.
"""

ON_TPUS = Costs(row=0.01, cached_row=0.01, cached=1.0, passing=0.0)
"""By their rooflines; not measured."""


WORTH = 1.15
"""Expected speed, over plain decoding's, from which on a model drafts for itself where no step is measured yet."""


@value
class AcceptanceLength(DraftLength):
    """The length of the greatest expected speed, if every drafted token is accepted with the running share p.

        argmax_k (1 + p + ... + p^k) / (1 + c w(k))

    k drafted tokens bring 1 + p + ... + p^k tokens (Leviathan et al. 2023) and c w(k) of a plain step's time besides;
    c is `row_cost`, and w(k) the least of `widths`, in drafted tokens of a sequence, that holds k, or k itself where
    none does. A sequence for which that is 0 drafts after `retry` steps, so that it is heard of again: as many tokens
    as cost what one costs.
    """

    row_cost: Number = ON_CPUS.row
    retry: Count = 16
    widths: tuple[float, ...] = static(default=())

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the best length, or one to try again."""
        best, most = self._best(draft.acceptance), draft.most
        again = (best == 0) & (draft.since >= self.retry)
        return jnp.minimum(jnp.where(again, int(self._paid(1)), best), most)

    def told(self, times: StepTimes, worth: float, context: float, past: PastDrafts) -> "AcceptanceLength":
        """Return the law at what a drafted token takes; a sequence whose drafts fail tries at a hundredth of the steps.

        A draft is worth its while from a plain step's speed on.
        """
        token = times.drafted + times.row + (times.drafted_cached + times.row_cached) * context
        return self.at(float(token / (times.plain + times.plain_cached * context)))

    def at(self, row_cost: float) -> "AcceptanceLength":
        """Return the law at another cost of a row, which tries again when that costs a hundredth of the steps since."""
        law = replace(self, row_cost=row_cost)
        return replace(law, retry=max(16, round(100 * row_cost * law.first)))

    @property
    def first(self) -> int:
        """The best where nothing is known, but a few at least, so that something is."""
        brought = [sum(self.supposed**i for i in range(k + 1)) for k in range(SHORT + 1)]
        speed = [brought[k] / (1 + self.row_cost * self._paid(k)) for k in range(SHORT + 1)]
        return max(range(SHORT + 1), key=speed.__getitem__) or int(self._paid(1))

    def _paid(self, length: int) -> float:
        """The drafted tokens that a draft of this length costs."""
        return _paid(self.widths, length)

    def _best(self, acceptance: Float[Array, ""]) -> Int[Array, ""]:
        paid = jnp.asarray([self._paid(length) for length in _LENGTHS], jnp.float32)
        return jnp.argmax(_brought(acceptance) / (1.0 + self.row_cost * paid)).astype(jnp.int32)


@value
class RooflineLength(DraftLength):
    """The length of the greatest expected speed for a model that drafts for itself, at this length of its text.

        argmax_k (1 + p + ... + p^k) / (1 + c(k)),   c(k) = (k drafted + w(k) row) / plain

    p and w(k) are as for `AcceptanceLength`. Each of the three times is that of the weights and, for each of the tokens
    in the cache, that of reading it: `times`, of sequences alike that stand side by side. So nothing is drafted where a
    text is short, nor where the speed is not expected to be `worth` of plain decoding's, for times are roughly known.

    A text begins with what the `past` tells of drafts: the share of them that is accepted, and the credit. Nor is a
    draft made that costs more than there is credit for: all texts together may lose eight plain steps, one of them
    four, and a hundredth of the others, and spend what they have saved. Where drafts would pay if they held, but do not
    hold, one token is drafted again when that costs a hundredth of the steps since.

    Texts that are written at once draft alike, by the share and the credit of all: a step takes as many passes as its
    longest draft, so that one that stands out is paid for by all, and one that does not draft is waited for.
    """

    # Of about the last thirty tokens: what drafts may cost is bounded, and once they stop little is heard.
    memory: ClassVar[float] = 0.97

    times: StepTimes
    worth: Number = WORTH
    widths: tuple[float, ...] = static(default=())
    past: PastDrafts = PastDrafts()

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the best length, or one token to try again."""
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
        """Return what a step that drafts so many tokens takes beside a plain one, in plain steps."""
        return self._costs(context)[drafted]

    def told(self, times: StepTimes, worth: float, context: float, past: PastDrafts) -> "RooflineLength":
        """Return the law with these."""
        return replace(self, times=times, worth=worth, past=past)

    def waiting(self) -> "RooflineLength":
        """Return the law for which no speed is worth it."""
        return replace(self, worth=jnp.inf)

    def by_past(self, begun: DraftState) -> DraftState:
        """Return what is known of a sequence before its first draft, by how those of others fared."""
        acceptance, credit = self.past.acceptance, self.past.credit
        return replace(
            begun,
            acceptance=jnp.full_like(begun.acceptance, acceptance),
            credit=jnp.full_like(begun.credit, jnp.minimum(credit, MOST_CREDIT)),
        )

    def _costs(self, context: Int[Array, ""]) -> Float[Array, " k"]:
        """What a step takes beside a plain one that drafts so many tokens, in plain steps."""
        cached, times = context.astype(jnp.float32), self.times
        ahead = jnp.asarray(_LENGTHS, jnp.float32)
        rows = jnp.asarray([_paid(self.widths, length) for length in _LENGTHS], jnp.float32)
        drafted = ahead * (times.drafted + times.drafted_cached * cached)
        verified = rows * (times.row + times.row_cached * cached)
        return (drafted + verified) / (times.plain + times.plain_cached * cached)

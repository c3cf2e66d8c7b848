"""How many tokens a step drafts for a sequence: laws driven by the acceptance rate of earlier drafts.

A draft never changes the output: the model samples every token as if there were no draft, and accepts a drafted token
only if it equals that sample (`decode.step.verify`). A law of lengths therefore affects only speed, and may use
measured times.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.types import Number, pytree, replace, value

SHORT = 4
"""Drafted tokens of a short draft, used for a new sequence and at a low acceptance rate."""

MOST_DRAFTED = 16
"""The most drafted tokens of one sequence in one step."""

TRIAL = 0.01
"""The share of the time of plain steps that trial drafts may cost."""


@value
class StepTimes:
    """Step times, in any one unit of time, as linear functions of the cached tokens of all sequences.

    A plain step takes `plain`, and `plain_cached` per cached token. A drafting pass, one token per sequence,
    takes `drafted`, and `drafted_cached` per cached token. Each verified row beyond the first of a sequence takes
    `row`, and `row_cached` per cached token that it attends to.
    """

    plain: Number
    plain_cached: Number
    drafted: Number
    drafted_cached: Number
    row: Number
    row_cached: Number

    def alike(self, sequences: float | int, rows: float | int) -> "StepTimes":
        """Return the times of `sequences` sequences with equal numbers of cached tokens and equal draft lengths.

        The cached coefficients become per token of each sequence; every drafted token of a sequence adds `rows` rows.
        """
        return StepTimes(
            plain=self.plain,
            plain_cached=self.plain_cached * sequences,
            drafted=self.drafted,
            drafted_cached=self.drafted_cached * sequences,
            row=self.row * rows,
            row_cached=self.row_cached * sequences,
        )


FIRST_CREDIT = 8.0
"""Plain steps: what the drafts of all sequences may cost before they have saved anything."""

MOST_CREDIT = 4.0
"""Plain steps: what the drafts of one sequence may cost, however much they saved."""


@value
class PastDrafts:
    """The drafting statistics of all earlier sequences, the prior for a new one.

    `acceptance` is the expected acceptance rate, `credit` the plain steps that drafts of
    all sequences may cost until they save more. `several` is 1 if more than one sequence is decoded at once, else 0.
    """

    acceptance: Number = 0.9  # high, because few blocks contain nearly all of the mass
    credit: Number = FIRST_CREDIT
    several: Number = 0.0


@pytree
class DraftState:
    """The drafting statistics of a sequence.

    `most` is the most tokens that its request allows per step, 0 for none; `length` is the next step's draft length.
    `acceptance` is the running acceptance rate of drafted tokens whose predecessors were all accepted. `since` counts
    the steps since the last draft. `credit` is the time that drafts have saved so far plus what they may cost before
    saving anything, in plain steps; a law without a cost leaves it unused. `before` has the statistics of the drafter
    that is tried first, if there is one.
    """

    most: Int[Array, "*b"]
    length: Int[Array, "*b"]
    acceptance: Float[Array, "*b"]
    since: Int[Array, "*b"]
    credit: Float[Array, "*b"]
    before: "DraftState | None" = None

    @property
    def wanted(self) -> Bool[Array | np.ndarray, "*b"]:
        """Whether the next step drafts with any drafter."""
        own = self.length > 0
        return own if self.before is None else own | self.before.wanted


def started(law: "DraftLength", most: Int[Array, "*b"]) -> DraftState:
    """Return the initial state of sequences whose requests allow `most` drafted tokens per step."""
    return DraftState(
        most=most,
        length=jnp.minimum(most, law.first),
        acceptance=jnp.full(most.shape, law.supposed, jnp.float32),
        since=jnp.zeros(most.shape, jnp.int32),
        credit=jnp.full(most.shape, FIRST_CREDIT, jnp.float32),
    )


class DraftLength:
    """Sets how many tokens the next step drafts, from earlier acceptance. Derive from it, as a `value`."""

    # The decay of the running acceptance rate per drafted token: an average over about the last ten.
    memory: ClassVar[float] = 0.9

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the draft length of the next step; the caller clips it to what the request allows.

        `entropy` is the raw entropy, in nats, of the distribution from which the newest token was sampled; `context`
        counts the cached tokens.
        """
        raise NotImplementedError

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether the draft ends after the token just drafted, given the drafter's entropy in nats."""
        return False

    def cost(self, drafted: Int[Array, ""], context: Int[Array, ""]) -> Float[Array, ""] | float:
        """Return the overhead of a step that drafts so many tokens over a plain step, in plain steps."""
        return 0.0

    def fitted(self, times: StepTimes, worth: float, context: float, past: PastDrafts) -> "DraftLength":
        """Return the law with measured step times, for equal sequences with `context` cached tokens each.

        A length is used only if its expected speed is at least `worth` times that of plain decoding. `past` has the
        statistics of earlier drafts. The tree structure is unchanged, so the compiled program stays valid. A law that
        uses none of this returns itself.
        """
        return self

    def waiting(self) -> "DraftLength":
        """Return the law to use before plain steps are measured: a law that depends on times drafts nothing."""
        return self

    def by_past(self, begun: DraftState) -> DraftState:
        """Return the state of a sequence before its first draft, given the statistics of other sequences."""
        return begun

    @property
    def first(self) -> int:
        """The draft length of a sequence's first step."""
        return SHORT

    @property
    def supposed(self) -> float:
        """The acceptance rate assumed before the first draft."""
        return 0.5


@value
class FixedLength(DraftLength):
    """The most that the request allows, at every step."""

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the most allowed."""
        return draft.most


@value
class EntropyLength(DraftLength):
    """The most that the request allows after an entropy of at most `bound` nats, otherwise none.

    The counterpart, for drafters without a distribution, of ending a draft where the drafter's entropy
    exceeds a bound (SVIP, Zhang et al. 2024: 0.6 nats; AdaEDL, Agrawal et al. 2024).
    """

    bound: Number = 0.6

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the most allowed, or 0."""
        return jnp.where(entropy <= self.bound, draft.most, 0)


@value
class StopEntropy(DraftLength):
    """The most that the request allows, but a draft ends where the drafter's entropy exceeds `bound` nats.

    For drafters with a distribution, such as a small model (SVIP, Zhang et al. 2024, the source of the bound).
    """

    bound: Number = 0.6

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the most allowed."""
        return draft.most

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether the drafter's entropy exceeds the bound."""
        return entropy > self.bound


def updated(
    law: DraftLength,
    draft: DraftState,
    stepped: Bool[Array, ""],
    drafted: Int[Array, ""],
    accepted: Int[Array, ""],
    entropy: Float[Array, ""],
    context: Int[Array, ""],
) -> DraftState:
    """Return the state after a step in which the sequence, if `stepped`, accepted `accepted` of `drafted` tokens.

    The tokens after a rejected one are unknown, so `accepted` plus the rejected one, if any, were tried.
    Drafts save the steps of the accepted tokens, less their own cost.
    """
    tried = jnp.minimum(accepted + 1, drafted)
    decay = law.memory ** tried.astype(jnp.float32)
    share = accepted.astype(jnp.float32) / jnp.maximum(tried, 1).astype(jnp.float32)
    saved = accepted.astype(jnp.float32) - jnp.where(drafted > 0, law.cost(drafted, context), 0.0)
    after = replace(
        draft,
        acceptance=decay * draft.acceptance + (1.0 - decay) * share,
        since=jnp.where(drafted > 0, 0, draft.since + 1),
        credit=jnp.minimum(draft.credit + TRIAL + saved, MOST_CREDIT),
    )
    after = replace(after, length=jnp.minimum(law.length(after, entropy, context), after.most).astype(jnp.int32))
    return replace(
        draft,
        length=jnp.where(stepped, after.length, draft.length),
        acceptance=jnp.where(stepped, after.acceptance, draft.acceptance),
        since=jnp.where(stepped, after.since, draft.since),
        credit=jnp.where(stepped, after.credit, draft.credit),
    )

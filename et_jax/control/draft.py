"""How many tokens a step drafts for a sequence: laws of the share of drafts that its model has accepted.

A draft never changes a text: the model samples every token as if none existed, and a drafted token counts only where
it equals that sample (`decode.step.verify`). What a law of lengths decides is time alone, so that it may go by the
clock.
"""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.types import Number, pytree, replace, value

SHORT = 4
"""Drafted tokens of a short draft: that of a sequence of which nothing is known, and those that seldom hold."""

MOST_DRAFTED = 16
"""Drafted tokens of one sequence in one step, at the very most."""

TRIAL = 0.01
"""Of plain steps: what trying whether drafts hold may cost."""


@value
class StepTimes:
    """What steps take, in any one unit of time, of sequences that hold tokens in the cache.

    A plain step takes `plain`, and `plain_cached` for every token held. A pass that drafts a token of each sequence
    takes `drafted`, and `drafted_cached` for every token held. A verified row beside that of a sequence takes `row`,
    and `row_cached` for every token held that it meets.
    """

    plain: Number
    plain_cached: Number
    drafted: Number
    drafted_cached: Number
    row: Number
    row_cached: Number

    def alike(self, sequences: float | int, rows: float | int) -> "StepTimes":
        """Return the times of so many sequences that hold as many tokens as one another and draft alike.

        What was for every token held is for every token that each of them holds; and for every drafted token of each of
        them there are `rows` rows.
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
"""Plain steps: what the drafts of all texts may cost without having saved any."""

MOST_CREDIT = 4.0
"""Plain steps: what the drafts of a text may cost, whatever was saved."""


@value
class PastDrafts:
    """How the drafts of all texts have fared, for a text of which nothing is known yet.

    `acceptance` is the share of drafted tokens that is expected to be accepted, `credit` the plain steps that drafts of
    all texts may cost until more are saved. `several` is 1 where more texts than one are written at once, else 0.
    """

    acceptance: Number = 0.9  # most: few blocks hold nearly all of the mass
    credit: Number = FIRST_CREDIT
    several: Number = 0.0


@pytree
class DraftState:
    """What is known of a sequence's drafts.

    `most` is what its request allows in a step, 0 for none; `length` what the next step drafts. `acceptance` is the
    running share of drafted tokens that were accepted, of those whose predecessors all were. `since` counts the steps
    since the last draft. `credit` is the time that drafts have saved so far, and what they may cost without having
    saved any, in plain steps; a law that tells no cost leaves it unused. Where something else is asked for guesses
    `before`, that is how those fare.
    """

    most: Int[Array, "*b"]
    length: Int[Array, "*b"]
    acceptance: Float[Array, "*b"]
    since: Int[Array, "*b"]
    credit: Float[Array, "*b"]
    before: "DraftState | None" = None

    @property
    def wanted(self) -> Bool[Array | np.ndarray, "*b"]:
        """Whether the next step is to draft something, or to ask for guesses."""
        own = self.length > 0
        return own if self.before is None else own | self.before.wanted


def started(law: "DraftLength", most: Int[Array, "*b"]) -> DraftState:
    """Return the state of sequences whose requests allow `most` drafted tokens a step, a few of them at first."""
    return DraftState(
        most=most,
        length=jnp.minimum(most, law.first),
        acceptance=jnp.full(most.shape, law.supposed, jnp.float32),
        since=jnp.zeros(most.shape, jnp.int32),
        credit=jnp.full(most.shape, FIRST_CREDIT, jnp.float32),
    )


class DraftLength:
    """Decides how many tokens the next step drafts, from how earlier drafts fared. Derive from it, as a `value`."""

    # What a drafted token leaves of the running share of those accepted, which so speaks of about the last ten.
    memory: ClassVar[float] = 0.9

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the drafted tokens of the next step, cut to what the request allows.

        `entropy` is that of the distribution which the newest token was sampled from, raw, in nats; `context` counts
        the tokens in the cache.
        """
        raise NotImplementedError

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether a draft ends with the token just drafted, from that distribution of the drafter, in nats."""
        return False

    def cost(self, drafted: Int[Array, ""], context: Int[Array, ""]) -> Float[Array, ""] | float:
        """Return what a step that drafts so many tokens takes beside a plain one, in plain steps."""
        return 0.0

    def told(self, times: StepTimes, worth: float, context: float, past: PastDrafts) -> "DraftLength":
        """Return the law that knows what steps take, of sequences alike that hold `context` tokens each.

        A speed is known to be one where it is expected to be at least `worth` of plain decoding's. `past` is how drafts
        have fared. The structure is the same, so that a program goes on with it. A law that asks for nothing of that is
        as it was.
        """
        return self

    def waiting(self) -> "DraftLength":
        """Return the law while it is not known what a plain step takes: one that goes by it drafts nothing."""
        return self

    def by_past(self, begun: DraftState) -> DraftState:
        """Return what is known of a sequence before its first draft, by how those of others fared."""
        return begun

    @property
    def first(self) -> int:
        """The drafted tokens of a sequence's first step."""
        return SHORT

    @property
    def supposed(self) -> float:
        """The share of drafted tokens that is taken for accepted before anything is known."""
        return 0.5


@value
class FixedLength(DraftLength):
    """As many as the request allows, at every step."""

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the most."""
        return draft.most


@value
class EntropyLength(DraftLength):
    """As many as the request allows where the model was certain, none where its entropy passed `bound`, in nats.

    The cousin, for drafts that have no distribution of their own, of stopping a draft where the drafter's entropy
    passes a bound (SVIP, Zhang et al. 2024: 0.6 nats; AdaEDL, Agrawal et al. 2024).
    """

    bound: Number = 0.6

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return all or nothing."""
        return jnp.where(entropy <= self.bound, draft.most, 0)


@value
class StopEntropy(DraftLength):
    """As many as the request allows, up to the first token that the drafter was not certain of: past `bound` nats.

    For drafters that have a distribution: a small model (SVIP, Zhang et al. 2024, whose bound this is).
    """

    bound: Number = 0.6

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the most."""
        return draft.most

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether the drafter's entropy passed the bound."""
        return entropy > self.bound


def updated(
    law: DraftLength,
    draft: DraftState,
    served: Bool[Array, ""],
    drafted: Int[Array, ""],
    accepted: Int[Array, ""],
    entropy: Float[Array, ""],
    context: Int[Array, ""],
) -> DraftState:
    """Return the state after a step that `served` the sequence or not, and accepted so many of its drafted tokens.

    A rejected token ends what is known of those after it, so `accepted` and one more, if there was one, were tried.
    What drafts saved is the steps that accepted tokens would have taken, less what the draft took.
    """
    tried = jnp.minimum(accepted + 1, drafted)
    kept = law.memory ** tried.astype(jnp.float32)
    share = accepted.astype(jnp.float32) / jnp.maximum(tried, 1).astype(jnp.float32)
    saved = accepted.astype(jnp.float32) - jnp.where(drafted > 0, law.cost(drafted, context), 0.0)
    after = replace(
        draft,
        acceptance=kept * draft.acceptance + (1.0 - kept) * share,
        since=jnp.where(drafted > 0, 0, draft.since + 1),
        credit=jnp.minimum(draft.credit + TRIAL + saved, MOST_CREDIT),
    )
    after = replace(after, length=jnp.minimum(law.length(after, entropy, context), after.most).astype(jnp.int32))
    return replace(
        draft,
        length=jnp.where(served, after.length, draft.length),
        acceptance=jnp.where(served, after.acceptance, draft.acceptance),
        since=jnp.where(served, after.since, draft.since),
        credit=jnp.where(served, after.credit, draft.credit),
    )

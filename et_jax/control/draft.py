"""How many tokens a step drafts for a sequence: laws of the share of drafts that its model has accepted.

A draft never changes a text: the model samples every token as if none existed, and a drafted token counts only where
it equals that sample (`decode.step.verify`). What a law of lengths decides is time alone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.types import Count, Number, pytree, replace, static, value


@pytree
class DraftState:
    """What is known of a sequence's drafts.

    `most` is what its request allows in a step, 0 for none; `length` what the next step drafts. `acceptance` is the
    running share of drafted tokens that were accepted, of those whose predecessors all were. `since` counts the steps
    since the last draft.
    """

    most: Int[Array, "*b"]
    length: Int[Array, "*b"]
    acceptance: Float[Array, "*b"]
    since: Int[Array, "*b"]


def started(law: "DraftLength", most: Int[Array, "*b"]) -> DraftState:
    """Return the state of sequences whose requests allow `most` drafted tokens a step, a few of them at first."""
    return DraftState(
        most=most,
        length=jnp.minimum(most, law.first),
        acceptance=jnp.full(most.shape, _UNKNOWN, jnp.float32),
        since=jnp.zeros(most.shape, jnp.int32),
    )


class DraftLength:
    """Decides how many tokens the next step drafts, from how earlier drafts fared. Derive from it, as a `value`."""

    def length(self, draft: DraftState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the drafted tokens of the next step, cut to what the request allows.

        `entropy` is that of the distribution which the newest token was sampled from, raw, in nats.
        """
        raise NotImplementedError

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether a draft ends with the token just drafted, from that distribution of the drafter, in nats."""
        return False

    @property
    def first(self) -> int:
        """The drafted tokens of a sequence's first step."""
        return SHORT


@value
class FixedLength(DraftLength):
    """As many as the request allows, at every step."""

    def length(self, draft: DraftState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the most."""
        return draft.most


@value
class EntropyLength(DraftLength):
    """As many as the request allows where the model was certain, none where its entropy passed `bound`, in nats.

    The cousin, for drafts that have no distribution of their own, of stopping a draft where the drafter's entropy
    passes a bound (SVIP, Zhang et al. 2024: 0.6 nats; AdaEDL, Agrawal et al. 2024).
    """

    bound: Number = 0.6

    def length(self, draft: DraftState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return all or nothing."""
        return jnp.where(entropy <= self.bound, draft.most, 0)


@value
class StopEntropy(DraftLength):
    """As many as the request allows, up to the first token that the drafter was not certain of: past `bound` nats.

    For drafters that have a distribution: a small model (SVIP, Zhang et al. 2024, whose bound this is).
    """

    bound: Number = 0.6

    def length(self, draft: DraftState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the most."""
        return draft.most

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether the drafter's entropy passed the bound."""
        return entropy > self.bound


ROW_COST = 0.1
"""Of a row of a step, over reading the weights once.

Assumed on CPUs: 0.04 by `benchmarks/results/drafting_forced.json`, more where a cache holds the weights.
"""

ROW_COST_OF_CHIPS = 0.01
"""Likewise on a GPU or TPU, by their rooflines; not measured."""


@value
class AcceptanceLength(DraftLength):
    """The length of the greatest expected speed, if every drafted token is accepted with the running share p.

        argmax_k (1 + p + ... + p^k) / (1 + c w(k))

    k drafted tokens bring 1 + p + ... + p^k tokens (Leviathan et al. 2023) and c w(k) of a plain step's time besides;
    c is `row_cost`, and w(k) the least of `widths`, in drafted tokens of a sequence, that holds k, or k itself where
    none does. A sequence for which that is 0 drafts after `retry` steps, so that it is heard of again: as many tokens
    as cost what one costs.
    """

    row_cost: Number = ROW_COST
    retry: Count = 16
    widths: tuple[float, ...] = static(default=())

    def length(self, draft: DraftState, entropy: Float[Array, ""]) -> Int[Array, ""]:
        """Return the best length, or one to try again."""
        best, most = self._best(draft.acceptance), draft.most
        again = (best == 0) & (draft.since >= self.retry)
        return jnp.minimum(jnp.where(again, int(self._paid(1)), best), most)

    @property
    def first(self) -> int:
        """The best where nothing is known, but a few at least, so that something is."""
        speed = [sum(_UNKNOWN**i for i in range(k + 1)) / (1 + self.row_cost * self._paid(k)) for k in range(SHORT + 1)]
        return max(range(SHORT + 1), key=speed.__getitem__) or int(self._paid(1))

    def _paid(self, length: int) -> float:
        """The drafted tokens that a draft of this length costs."""
        return min((width for width in self.widths if width >= length > 0), default=float(length))

    def _best(self, acceptance: Float[Array, ""]) -> Int[Array, ""]:
        lengths = range(MOST_DRAFTED + 1)
        brought = jnp.cumsum(acceptance ** jnp.asarray(lengths, jnp.float32))
        paid = jnp.asarray([self._paid(length) for length in lengths], jnp.float32)
        return jnp.argmax(brought / (1.0 + self.row_cost * paid)).astype(jnp.int32)


SHORT = 4
"""Drafted tokens of a short draft: that of a sequence of which nothing is known, and those that seldom hold."""

MOST_DRAFTED = 16
"""Drafted tokens of one sequence in one step, at the very most."""

_UNKNOWN = 0.5  # the share that is taken for accepted before anything is known
_MEMORY = 0.9  # what a drafted token leaves of the running share: it speaks of about the last ten


def updated(
    law: DraftLength,
    draft: DraftState,
    served: Bool[Array, ""],
    drafted: Int[Array, ""],
    accepted: Int[Array, ""],
    entropy: Float[Array, ""],
) -> DraftState:
    """Return the state after a step that `served` the sequence or not, and accepted so many of its drafted tokens.

    A rejected token ends what is known of those after it, so `accepted` and one more, if there was one, were tried.
    """
    tried = jnp.minimum(accepted + 1, drafted)
    kept = _MEMORY ** tried.astype(jnp.float32)
    share = accepted.astype(jnp.float32) / jnp.maximum(tried, 1).astype(jnp.float32)
    after = replace(
        draft,
        acceptance=kept * draft.acceptance + (1.0 - kept) * share,
        since=jnp.where(drafted > 0, 0, draft.since + 1),
    )
    after = replace(after, length=jnp.minimum(law.length(after, entropy), after.most).astype(jnp.int32))
    return replace(
        draft,
        length=jnp.where(served, after.length, draft.length),
        acceptance=jnp.where(served, after.acceptance, draft.acceptance),
        since=jnp.where(served, after.since, draft.since),
    )

"""How many tokens a step drafts for a sequence: laws of the share of drafts that its model has accepted.

A draft never changes a text: the model samples every token as if none existed, and a drafted token counts only where
it equals that sample (`decode.step.verify`). What a law of lengths decides is time alone.
"""

import dataclasses

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
        acceptance=jnp.full(most.shape, law.supposed, jnp.float32),
        since=jnp.zeros(most.shape, jnp.int32),
    )


class DraftLength:
    """Decides how many tokens the next step drafts, from how earlier drafts fared. Derive from it, as a `value`."""

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the drafted tokens of the next step, cut to what the request allows.

        `entropy` is that of the distribution which the newest token was sampled from, raw, in nats; `context` counts
        the tokens in the cache.
        """
        raise NotImplementedError

    def stops(self, entropy: Float[Array, ""]) -> Bool[Array, ""] | bool:
        """Return whether a draft ends with the token just drafted, from that distribution of the drafter, in nats."""
        return False

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What rows of a step cost on a kind of machine.

    `row` is the time of a row beside others, over that of reading the weights once; `cached_row` that of a row which
    meets a sequence's cache beside another, over reading that cache once; `cached` that of a byte of the cache, over a
    byte of the weights. What a pass takes beside all that is the time of reading `passing` bytes of the weights.
    """

    row: float
    cached_row: float
    cached: float
    passing: float


ON_CPUS = Costs(row=0.1, cached_row=0.2, cached=3.0, passing=40e6)
"""A row costs 0.04 by `benchmarks/results/drafting_forced.json`, more where the machine's cache holds the weights.

The others are rough: chosen by a few timings of the shape of SmolLM-135M on two cores, in bfloat16.
"""

ON_CHIPS = Costs(row=0.01, cached_row=0.01, cached=1.0, passing=0.0)
"""On a GPU or TPU, by their rooflines; not measured."""


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

        argmax_k (1 + p + ... + p^k) (1 + a L) / (k (1 + s a L) + 1 + a L + (c + e a L) w(k))

    p, c and w(k) are as for `AcceptanceLength`. Times are counted in readings of the weights: a plain step is one, and
    reads L tokens of the cache, each `cached` = a; a drafted token is another pass that reads a `share` s of them; and
    each of the w(k) that a step has room for is a row of the weights' and, at `cached_row_cost` = e of reading it once,
    of the cache's. So nothing is drafted where a text is short, nor where less than 15% would be gained, for costs are
    roughly known. Where drafts would pay if they held, but do not hold, one token is drafted again when that costs a
    hundredth of the steps since.
    """

    cached: Number
    share: Number
    row_cost: Number = ON_CPUS.row
    cached_row_cost: Number = ON_CPUS.cached_row
    widths: tuple[float, ...] = static(default=())

    def length(self, draft: DraftState, entropy: Float[Array, ""], context: Int[Array, ""]) -> Int[Array, ""]:
        """Return the best length, or one token to try again."""
        time = self._times(context)

        def best(acceptance: Float[Array, ""]) -> Int[Array, ""]:
            speed = _brought(acceptance) / time
            return jnp.where(jnp.max(speed) >= _WORTH, jnp.argmax(speed), 0).astype(jnp.int32)

        may_pay = best(jnp.ones_like(draft.acceptance)) > 0
        again = may_pay & (draft.since.astype(jnp.float32) >= 100.0 * (time[1] - 1.0))
        found = best(draft.acceptance)
        return jnp.minimum(jnp.where((found == 0) & again, 1, found), draft.most)

    @property
    def supposed(self) -> float:
        """Most: few blocks hold nearly all of the mass."""
        return 0.9

    def _times(self, context: Int[Array, ""]) -> Float[Array, " k"]:
        """The time of a step that drafts so many tokens, over that of a plain one."""
        cache = self.cached * context.astype(jnp.float32)
        ahead = jnp.asarray(_LENGTHS, jnp.float32)
        rows = jnp.asarray([_paid(self.widths, length) for length in _LENGTHS], jnp.float32)
        drafted = ahead * (1.0 + self.share * cache)
        verified = 1.0 + cache + (self.row_cost + self.cached_row_cost * cache) * rows
        return (drafted + verified) / (1.0 + cache)


SHORT = 4
"""Drafted tokens of a short draft: that of a sequence of which nothing is known, and those that seldom hold."""

MOST_DRAFTED = 16
"""Drafted tokens of one sequence in one step, at the very most."""

_LENGTHS = range(MOST_DRAFTED + 1)
_WORTH = 1.15  # expected speed from which on a model drafts for itself: what rows cost is roughly known
_MEMORY = 0.9  # what a drafted token leaves of the running share: it speaks of about the last ten


def _paid(widths: tuple[float, ...], length: int) -> float:
    """The least of the widths that holds a draft of this length, or the length where none does."""
    return min((width for width in widths if width >= length > 0), default=float(length))


def _brought(acceptance: Float[Array, ""]) -> Float[Array, " k"]:
    """The tokens that a draft of every length is expected to bring, that of the model's own with them."""
    return jnp.cumsum(acceptance ** jnp.asarray(_LENGTHS, jnp.float32))


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
    """
    tried = jnp.minimum(accepted + 1, drafted)
    kept = _MEMORY ** tried.astype(jnp.float32)
    share = accepted.astype(jnp.float32) / jnp.maximum(tried, 1).astype(jnp.float32)
    after = replace(
        draft,
        acceptance=kept * draft.acceptance + (1.0 - kept) * share,
        since=jnp.where(drafted > 0, 0, draft.since + 1),
    )
    after = replace(after, length=jnp.minimum(law.length(after, entropy, context), after.most).astype(jnp.int32))
    return replace(
        draft,
        length=jnp.where(served, after.length, draft.length),
        acceptance=jnp.where(served, after.acceptance, draft.acceptance),
        since=jnp.where(served, after.since, draft.since),
    )

"""What a selector may see of one sequence's blocks, and what may be guessed from it."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.bounds import Interval
from et_jax.sums import log_softmax, softmax, total
from et_jax.types import pytree, replace

Need = Literal["summaries", "codes", "masses", "surprisals", "sensitivity"]
"""What a selector may look at: boxes and means of blocks, 8-bit keys, the last attention mass of each block and the
tokens' surprisals, which cost bytes, and how sensitive the model is to each of its heads, which must have been
measured."""

F = TypeVar("F", bound=Callable)


def needing(*needs: Need) -> Callable[[F], F]:
    """Return a decorator that says what a function of a `BlockView` reads besides the summaries.

    The cache keeps exactly what the selectors of its layers need: "codes" is what `BlockView.coded` is
    made of, "surprisals" what `mean_surprisal` is made of. "masses" are kept with the control state, "sensitivity"
    with the model (`models.calibration`).
    """
    unknown = set(needs) - set(get_args(Need))
    if unknown:
        raise ValueError(f"needing: got {sorted(unknown)}, wanted some of {', '.join(get_args(Need))}")

    def mark(function: F) -> F:
        function.needs = frozenset(needs)
        return function

    return mark


def needs_of(given: Any) -> frozenset[Need]:
    """Return what a function or a selector needs."""
    return getattr(given, "needs", frozenset())


@pytree
class BlockView:
    """What is known of one sequence's blocks, for one layer and KV head, without reading them.

    `query` holds the group's queries, scaled so that query . key is the attention score; `score` bounds
    the scores of a block's keys by its box, and `middle` is that of its mean key. Where a layer has a soft cap, both
    are of capped scores, and `mean_score` bounds their mean, which is elsewhere `middle` itself, and None.
    `value_radius` is the greatest distance of a value from the block's mean value. Blocks cover
    positions `start` to `start + num_tokens - 1`; `num_tokens` is 0 where the sequence holds no block,
    and where a sliding window hides part of one, for then its summary speaks of tokens that are not seen.
    `length` counts the sequence's tokens. `tolerance` is the attention mass that may be left unread, and
    `head_tolerance` that of each query head, the same unless a rule of heads sets them apart. The block that
    the sequence ends in is always read: `tail_log_mass` is the log of its attention mass, from its keys
    themselves. `coded` bounds the log of a block's attention mass by 8-bit copies of its keys (see
    `bounds.coded_mass`) and `mean_surprisal` is the mean of -log p of its tokens, both in nats; that is 0 of the block
    that the sequence ends in, for of drafted tokens, which are read side by side, none knows the others'. `last_mass`
    is the share of attention mass that a block had when it was last read, 1 where that never was. `sensitivity` is what
    an error of length 1 in each head's output costs, in nats of divergence, times the model's number of query heads:
    over the tolerance, one head's part is a share of its own. Each of the four is None unless the selector needs it
    (see `needing`). `most_blocks` is how many blocks the longest of the sequences holds that are looked at together, None
    where that is not known: what lies beyond needs no work, and nothing else may go by it. A selector sees one view;
    `*b` is many at once.
    """

    query: Float[Array, "*b g d"]
    score: Interval
    middle: Float[Array, "*b g n"]
    key_min: Float[Array, "*b n d"]
    key_max: Float[Array, "*b n d"]
    key_mean: Float[Array, "*b n d"]
    value_mean: Float[Array, "*b n d"]
    value_radius: Float[Array, "*b n"]
    start: Int[Array, "*b n"]
    num_tokens: Int[Array, "*b n"]
    length: Int[Array, "*b"]
    tolerance: Float[Array, "*b"]
    head_tolerance: Float[Array, "*b g"]
    tail_log_mass: Float[Array, "*b g"]
    mean_score: Interval | None = None
    coded: Interval | None = None
    mean_surprisal: Float[Array, "*b n"] | None = None
    sensitivity: Float[Array, "*b g"] | None = None
    last_mass: Float[Array, "*b g n"] | None = None
    most_blocks: Int[Array, ""] | None = None


def tolerating(view: BlockView, tolerance: Float[Array, ""]) -> BlockView:
    """Return the view of a sequence with another tolerance, the same for every head."""
    return replace(view, tolerance=tolerance, head_tolerance=jnp.full_like(view.head_tolerance, tolerance))


def tail(view: BlockView) -> Bool[Array, " n"]:
    """Return which block the sequence ends in; none where a sliding window hides part of that one."""
    return (view.num_tokens > 0) & (view.start + view.num_tokens == view.length)


def exact_at_tail(view: BlockView, log_mass: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return what is thought of each block's log mass with the tail's own in its place."""
    return jnp.where(tail(view), view.tail_log_mass[:, None], log_mass)


def estimated_log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the log of n e^{q . mean key}, a block's mass were its keys all alike; the least float if not held.

    By Jensen's inequality no block holds less where there is no soft cap. That of the tail is its own.
    """
    log_count = jnp.log(jnp.maximum(view.num_tokens, 1).astype(jnp.float32))
    return jnp.where(view.num_tokens > 0, exact_at_tail(view, log_count + view.middle), jnp.finfo(jnp.float32).min)


def likeliest_log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the best guess at the log of each block's mass: the middle of what 8-bit keys allow, or the mean keys.

    Of a block that is not held it is the least float.
    """
    if view.coded is None:
        return estimated_log_mass(view)
    log_mass = exact_at_tail(view, 0.5 * (view.coded.low + view.coded.high))
    return jnp.where(view.num_tokens > 0, log_mass, jnp.finfo(jnp.float32).min)


def attention_entropy(log_mass: Float[Array, "*b n"], held: Bool[Array, "*#b n"]) -> Float[Array, "*b"]:
    """Return the entropy of attention over the blocks held, over log(1 + their number): from 0 to below 1.

        p_b = softmax of log_mass,  h = -sum_b p_b log p_b / log(1 + blocks held)

    0 where none is held. The denominator is that of one block more, so a single block gives 0 and not 0 / 0.
    """
    log_mass = jnp.where(held, log_mass, jnp.finfo(jnp.float32).min)
    log_share = log_softmax(log_mass)
    entropy = -total(jnp.where(held, jnp.exp(log_share) * log_share, 0.0))
    return entropy / jnp.log1p(jnp.maximum(jnp.sum(held, axis=-1), 1).astype(jnp.float32))


def mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the estimated share of attention mass in each block, in [0, 1], its keys taken for their mean."""
    return softmax(estimated_log_mass(view))


@needing("codes")
def coded_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the share of attention mass in each block by 8-bit copies of its keys: nearly the truth."""
    if view.coded is None:
        raise ValueError("coded_mass: this view has no key codes; a selector that reads them says so by `needing`.")
    return softmax(likeliest_log_mass(view))


@needing("masses")
def last_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the share of attention mass that each block, or the one before it, had when last read: no key is needed.

    A head that copies moves on with the text, so what lies on a block may lie on the next one by the next token. A
    block that was never read has 1, one that is not read keeps what it had.
    """
    if view.last_mass is None:
        raise ValueError("last_mass: this view has no last masses; a selector that reads them says so by `needing`.")
    before = jnp.pad(view.last_mass[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(view.num_tokens > 0, jnp.maximum(view.last_mass, before), 0.0)


def box_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the share of attention mass in each block, if one key more is half way from their mean to the box's end.

        Z_b ~ n e^m + e^{(m + h)/2},  m = q . mean key, h the greatest score that the box of the keys allows

    By mean keys alone one key among many does not show; the box says that there may be one, and far too much of it.
    Source: the box is Quest's (Tang et al. 2024), half way a choice of this package.
    """
    one = jnp.where(view.num_tokens > 0, 0.5 * (view.middle + view.score.high), jnp.finfo(jnp.float32).min)
    return softmax(exact_at_tail(view, jnp.logaddexp(estimated_log_mass(view), one)))


@needing("masses")
def greater_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the greater of `box_mass` and `last_mass`: neither alone sees both what turns up and what stands out.

    Means and boxes tell of every block at every token, roughly; the last mass tells more, but not where attention goes
    next.
    """
    return jnp.maximum(box_mass(view), last_mass(view))


def valid_values(view: BlockView) -> Float[Array, "n d"]:
    """Return each block's mean value in float32, 0 where none is held."""
    return jnp.where((view.num_tokens > 0)[:, None], view.value_mean.astype(jnp.float32), 0.0)

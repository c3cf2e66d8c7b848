"""What a selector may read of one sequence's blocks, and estimates computed from it."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.bounds import Interval
from et_jax.sums import log_softmax, softmax, total
from et_jax.types import pytree, replace

Need = Literal["summaries", "codes", "masses", "surprisals", "sensitivity"]
"""Optional inputs of a selector beyond boxes and means of blocks: 8-bit keys, the last attention mass of each block and
the tokens' surprisals, which cost bytes, and the model's sensitivity to each head, which must have been
measured."""

F = TypeVar("F", bound=Callable)


def needing(*needs: Need) -> Callable[[F], F]:
    """Return a decorator that declares what a function of a `BlockView` reads besides the summaries.

    The cache stores exactly the needs of its layers' selectors: "codes" for `BlockView.coded`,
    "surprisals" for `mean_surprisal`. "masses" are stored in the control state, "sensitivity"
    in the model (`models.calibration`).
    """
    unknown = set(needs) - set(get_args(Need))
    if unknown:
        raise ValueError(f"needing: got {sorted(unknown)}, wanted some of {', '.join(get_args(Need))}")

    def mark(function: F) -> F:
        function.needs = frozenset(needs)
        return function

    return mark


def needs_of(given: Any) -> frozenset[Need]:
    """Return the declared needs of a function or a selector."""
    return getattr(given, "needs", frozenset())


@pytree
class BlockView:
    """Summaries of one sequence's blocks, for one layer and KV head, known without reading the blocks.

    `query` has the group's queries, scaled so that query . key is the attention score; `score` bounds
    the scores of a block's keys by its box, and `middle` is that of its mean key. If a layer has a soft cap, both
    are of capped scores, and `mean_score` bounds their mean; else the mean is `middle`, and `mean_score` None.
    `value_radius` is the greatest distance of a value from the block's mean value. Blocks cover
    positions `start` to `start + num_tokens - 1`; `num_tokens` is 0 for an unused block,
    and for one that a sliding window hides in part, because its summary covers hidden tokens.
    `length` counts the sequence's tokens. `tolerance` is the attention mass that may be left unread, and
    `head_tolerance` that of each query head, equal unless a head rule sets it. The tail, the block that
    the sequence ends in, is always read: `tail_log_mass` is the log of its attention mass, computed from its
    keys. `coded` bounds the log of a block's attention mass by 8-bit copies of its keys (see
    `bounds.coded_mass`), in nats, and `coded_mean` is the mean of their scores. `mean_surprisal` is the mean of -log p
    of its tokens, in nats; it is 0 for the tail, because drafted tokens are verified in parallel, before each other's
    surprisals are known. `last_mass` is the share of attention mass that a block had when it was last read, 1 if it
    never was. `sensitivity` is the divergence, in nats, from an error of length 1 in each head's output, times the
    number of query heads: compared with the tolerance, it gives every head an equal share. Each of the five is None
    unless the selector needs it (see `needing`). `most_blocks` is the number of blocks of the longest sequence in the
    batch, None if unknown: it serves only to skip work beyond it. A selector sees one view; `*b` is many at once.
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
    coded_mean: Float[Array, "*b g n"] | None = None
    mean_surprisal: Float[Array, "*b n"] | None = None
    sensitivity: Float[Array, "*b g"] | None = None
    last_mass: Float[Array, "*b g n"] | None = None
    most_blocks: Int[Array, ""] | None = None


def tolerating(view: BlockView, tolerance: Float[Array, ""]) -> BlockView:
    """Return the view with another tolerance, the same for every head."""
    return replace(view, tolerance=tolerance, head_tolerance=jnp.full_like(view.head_tolerance, tolerance))


def tail(view: BlockView) -> Bool[Array, " n"]:
    """Return the mask of the block that the sequence ends in; none if a sliding window hides part of it."""
    return (view.num_tokens > 0) & (view.start + view.num_tokens == view.length)


def exact_at_tail(view: BlockView, log_mass: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return `log_mass` with the tail's own in its place."""
    return jnp.where(tail(view), view.tail_log_mass[:, None], log_mass)


def estimated_log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the log of n e^{q . mean key}, a block's mass if all its keys were equal; the least float if unused.

    By Jensen's inequality a block's mass is at least that without a soft cap. The tail's mass is exact.
    """
    log_count = jnp.log(jnp.maximum(view.num_tokens, 1).astype(jnp.float32))
    return jnp.where(view.num_tokens > 0, exact_at_tail(view, log_count + view.middle), jnp.finfo(jnp.float32).min)


def likeliest_log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the best estimate of the log of each block's mass: the middle of the bounds from 8-bit keys, or mean keys.

    The least float for an unused block.
    """
    if view.coded is None:
        return estimated_log_mass(view)
    log_mass = exact_at_tail(view, 0.5 * (view.coded.low + view.coded.high))
    return jnp.where(view.num_tokens > 0, log_mass, jnp.finfo(jnp.float32).min)


def attention_entropy(log_mass: Float[Array, "*b n"], valid: Bool[Array, "*#b n"]) -> Float[Array, "*b"]:
    """Return the entropy of attention over the valid blocks, over log(1 + their number): from 0 to below 1.

        p_b = softmax of log_mass,  h = -sum_b p_b log p_b / log(1 + valid blocks)

    0 if none is valid. The denominator counts one more block, so a single block gives 0 and not 0 / 0.
    """
    log_mass = jnp.where(valid, log_mass, jnp.finfo(jnp.float32).min)
    log_share = log_softmax(log_mass)
    entropy = -total(jnp.where(valid, jnp.exp(log_share) * log_share, 0.0))
    return entropy / jnp.log1p(jnp.maximum(jnp.sum(valid, axis=-1), 1).astype(jnp.float32))


def mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the estimated share of attention mass in each block, in [0, 1], from its mean key."""
    return softmax(estimated_log_mass(view))


@needing("codes")
def coded_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the share of attention mass in each block from 8-bit copies of its keys: nearly exact."""
    if view.coded is None:
        raise ValueError("coded_mass: no key codes in this view; a selector that reads them declares it by `needing`.")
    return softmax(likeliest_log_mass(view))


@needing("masses")
def last_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the share of attention mass that each block, or the one before it, had when last read; reads no key.

    A head that copies moves on with the text, so attention on a block may be on the next one at the next token. A
    block that was never read has 1; an unread block keeps its last share.
    """
    if view.last_mass is None:
        raise ValueError("last_mass: no last masses in this view; a selector that reads them declares it by `needing`.")
    before = jnp.pad(view.last_mass[:, :-1], ((0, 0), (1, 0)))
    return jnp.where(view.num_tokens > 0, jnp.maximum(view.last_mass, before), 0.0)


def box_log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the log of each block's mass if one more key lies half way from their mean to the box's end.

        Z_b ~ n e^m + e^{(m + h)/2},  m = q . mean key, h the greatest score that the box of the keys allows

    A mean key hides a single outlier among many keys; the box alone overestimates it. The least float for an unused
    block. Source: the box is Quest's (Tang et al. 2024), half way a choice of this package.
    """
    one = jnp.where(view.num_tokens > 0, 0.5 * (view.middle + view.score.high), jnp.finfo(jnp.float32).min)
    return exact_at_tail(view, jnp.logaddexp(estimated_log_mass(view), one))


def box_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the share of attention mass in each block by `box_log_mass`, in [0, 1]."""
    return softmax(box_log_mass(view))


@needing("masses")
def greater_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the greater of `box_mass` and `last_mass`.

    Means and boxes cover every block at every token, roughly; the last mass is more accurate, but does not show where
    attention goes next.
    """
    return jnp.maximum(box_mass(view), last_mass(view))


def valid_values(view: BlockView) -> Float[Array, "n d"]:
    """Return each block's mean value in float32, 0 for an unused block."""
    return jnp.where((view.num_tokens > 0)[:, None], view.value_mean.astype(jnp.float32), 0.0)

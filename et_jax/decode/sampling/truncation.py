"""Truncations of the token distribution, each by a threshold on the logits or by a distance from the entropy.

Nothing sorts the vocabulary. A threshold keeps the tokens whose logit reaches it, including ties. Most thresholds are
found by bisection over the ordered bit patterns of float32, so they are exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.decode.sampling.settings import Sampling, divisor
from et_jax.sums import total

_ROWS_TOGETHER = 4  # rows per tile on a CPU, which processes only rows with the truncation
_SORTED = 64  # logits that Min-k looks at in one turn: it seldom needs a second


class Truncated(NamedTuple):
    """Truncated logits: the tokens with `logits` >= `cut` may be sampled, at least one per row."""

    logits: Float[Array, "b v"]
    cut: Float[Array, " b"]


def truncate(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    sampling: Sampling,
    least: Float[Array, " b"],
    own: Float[Array, "b v"],
) -> Truncated:
    """Return each row truncated by `least` and by every truncation of its request.

    `own` are the model's raw logits; `logits` are those after penalties and biases.

    With p = softmax(logits / temperature) and its entropy H in nats, a token is kept
    - by `top_k`, and by `top_p` among those, if it is one of the k likeliest, or of the likeliest of that mass;
    - by `min_p`, if p is at least that share of the greatest;
    - by `top_n_sigma`, if its logit is at most that many standard deviations of `own` below the greatest
      (Tang et al. 2024, Top-n-sigma);
    - by `min_k`, if it is one of the k likeliest: k is the i for which the fall from the i-th greatest logit to the
      next, over i, is greatest, or `min_k` over the range of `own`, if that is more (Ding et al. 2026, Min-k);
    - by `eta_cutoff`, if p >= min(eta, sqrt(eta) exp(-H)) (Hewitt et al. 2022);
    - by `p_less`, if p is at least the sum of all p^2 (Tan et al. 2025, p-less sampling);
    - by `top_h`, if it is one of the likeliest whose entropy, renormalised, is at most `top_h` H
      (Baghaei Potraghloo et al. 2025, Top-H);
    - by `typical_p`, if it is one of the tokens of that mass whose surprisal is nearest to H (Meister et al. 2023).

    If no token passes all of them, the likeliest is kept, under `typical_p` the likeliest that it keeps. Rows that are
    greedy or without truncation get `least`; passes over the vocabulary are made only for rows that require them.
    """
    asks = temperature > 0
    peak = jnp.max(logits, axis=-1)
    heat = divisor(temperature)
    cut = jnp.maximum(_by_rank_and_share(logits, asks, peak, heat, sampling), least)
    entropic = (sampling.eta_cutoff > 0) | (sampling.top_h > 0) | (sampling.typical_p < 1) | sampling.p_less
    wanted = asks & (entropic | (sampling.top_n_sigma > 0) | (sampling.min_k > 0))
    by_entropy = jax.lax.cond(
        jnp.any(wanted),
        lambda: _by_entropy(logits, asks, peak, heat, sampling, own),
        lambda: Truncated(logits, jnp.full_like(cut, -jnp.inf)),
    )
    return Truncated(
        by_entropy.logits, jnp.minimum(jnp.maximum(cut, by_entropy.cut), jnp.max(by_entropy.logits, axis=-1))
    )


def _by_rank_and_share(
    logits: Float[Array, "b v"],
    asks: Bool[Array, " b"],
    peak: Float[Array, " b"],
    heat: Float[Array, " b"],
    sampling: Sampling,
) -> Float[Array, " b"]:
    """Return the strictest threshold of top-k, top-p after top-k, and min-p."""
    wants_k = asks & (sampling.top_k > 0) & (sampling.top_k < logits.shape[-1])
    wants_p = asks & (sampling.top_p < 1.0)

    def bisect_k(rows: Int[Array, " t"]) -> Float[Array, " t"]:
        some = logits[rows]
        return _cut(some, jnp.ones_like(some), sampling.top_k[rows].astype(jnp.float32))

    cut_k = _among(wants_k, bisect_k)

    def bisect_p(rows: Int[Array, " t"]) -> Float[Array, " t"]:
        some = logits[rows]
        mass = jnp.exp((some - peak[rows][:, None]) / heat[rows][:, None])
        mass = jnp.where(some >= cut_k[rows][:, None], mass, 0.0)
        return _cut(some, mass, sampling.top_p[rows] * total(mass))

    cut_p = _among(wants_p, bisect_p)
    cut_min = jnp.where(asks, peak + heat * jnp.log(sampling.min_p), -jnp.inf)
    return jnp.maximum(jnp.maximum(cut_k, cut_p), cut_min)


def _by_entropy(
    logits: Float[Array, "b v"],
    asks: Bool[Array, " b"],
    peak: Float[Array, " b"],
    heat: Float[Array, " b"],
    sampling: Sampling,
    own: Float[Array, "b v"],
) -> Truncated:
    """Apply the truncations that depend on the shape of the distribution."""
    present = logits > -jnp.inf
    u = jnp.where(present, (logits - peak[:, None]) / heat[:, None], 0.0)
    weight = jnp.where(present, jnp.exp(u), 0.0)
    s0, s1, squares = total(weight), total(weight * u), total(weight * weight)
    log_s0 = jnp.log(s0)
    entropy = jnp.maximum(log_s0 - s1 / s0, 0.0)

    log_eta = jnp.log(sampling.eta_cutoff)
    eta = jnp.where(sampling.eta_cutoff > 0, jnp.minimum(log_eta, 0.5 * log_eta - entropy) + log_s0, -jnp.inf)
    p_less = jnp.where(sampling.p_less, jnp.log(squares) - log_s0, -jnp.inf)
    finite = own > -jnp.inf
    count = jnp.sum(finite, axis=-1, dtype=jnp.float32)
    mean = total(jnp.where(finite, own, 0.0)) / count
    variance = total(jnp.where(finite, (own - mean[:, None]) ** 2, 0.0)) / count
    sigma = jnp.where(sampling.top_n_sigma > 0, peak - sampling.top_n_sigma * jnp.sqrt(variance), -jnp.inf)

    def bisect_h(rows: Int[Array, " t"]) -> Float[Array, " t"]:
        bound = sampling.top_h[rows] * entropy[rows]

        def within(kept: Bool[Array, "t v"]) -> Bool[Array, " t"]:
            mass = total(jnp.where(kept, weight[rows], 0.0))
            return jnp.log(mass) - total(jnp.where(kept, weight[rows] * u[rows], 0.0)) / mass <= bound

        return _lowest(logits[rows], within)

    cut_h = _among(asks & (sampling.top_h > 0) & (sampling.top_h < 1), bisect_h)
    span = jnp.max(own, axis=-1) - jnp.min(jnp.where(finite, own, jnp.inf), axis=-1)
    fewest = jnp.minimum(jnp.floor(sampling.min_k / span), float(own.shape[-1]))  # all tokens if they are alike
    cut_cliff = _among(asks & (sampling.min_k > 0), lambda rows: _cliff(logits[rows], fewest[rows]))
    cut = jnp.maximum(peak + heat * jnp.maximum(eta, p_less), jnp.maximum(jnp.maximum(sigma, cut_h), cut_cliff))

    wants_typical = asks & (sampling.typical_p < 1.0)
    nearness = -jnp.abs(u - log_s0[:, None] + entropy[:, None])

    def bisect_typical(rows: Int[Array, " t"]) -> Float[Array, " t"]:
        return _cut(nearness[rows], weight[rows], sampling.typical_p[rows] * s0[rows])

    typical = present & (nearness >= _among(wants_typical, bisect_typical)[:, None])
    left = jnp.where(wants_typical[:, None] & ~typical, -jnp.inf, logits)
    return Truncated(left, jnp.where(asks, cut, -jnp.inf))


def _cliff(logits: Float[Array, "b v"], fewest: Float[Array, " b"]) -> Float[Array, " b"]:
    """Return the i-th greatest logit of each row for the i of the greatest fall to the next one over i.

    If these are fewer tokens than `fewest`, return the logit of that rank. Logits are looked at from the greatest down,
    until no fall of the rest can be greater.
    """
    least = jnp.min(jnp.where(logits > -jnp.inf, logits, jnp.inf), axis=-1)
    size = min(_SORTED, logits.shape[-1])

    def rank(value: Float[Array, " b"]) -> Float[Array, " b"]:
        return jnp.sum(logits >= value[:, None], axis=-1, dtype=jnp.float32)

    def is_open(found: tuple[Float[Array, " b"], ...]) -> Bool[Array, " b"]:
        most, _, value = found
        return (value > least) & ((value - least) / rank(value) > most)

    def look(found: tuple[Float[Array, " b"], ...]) -> tuple[Float[Array, " b"], ...]:
        most, cut, value = found
        below = jnp.where(logits < value[:, None], logits, -jnp.inf)
        # the barrier keeps XLA from cutting this again: it would then sort all of them on a CPU
        after = jax.lax.optimization_barrier(jax.lax.top_k(below, size)[0])
        before = jnp.concatenate([value[:, None], after[:, :-1]], axis=-1)
        place = rank(value)[:, None] + jnp.arange(size, dtype=jnp.float32)
        fall = jnp.where(after > -jnp.inf, (before - after) / place, -jnp.inf)
        greatest = jnp.max(fall, axis=-1)
        here = jnp.take_along_axis(before, jnp.argmax(fall, axis=-1)[:, None], axis=-1)[:, 0]
        later = jnp.maximum(after[:, -1], least)
        open_mask, more = is_open(found), greatest > most
        new = jnp.where(more, greatest, most), jnp.where(more, here, cut), later
        return tuple(jnp.where(open_mask, x, known) for x, known in zip(new, found, strict=True))

    peak = jnp.max(logits, axis=-1)
    begun = jnp.full_like(peak, -jnp.inf), peak, peak
    _, cut, _ = jax.lax.while_loop(lambda found: jnp.any(is_open(found)), look, begun)
    few = rank(cut) < fewest

    def by_rank() -> Float[Array, " b"]:
        return jnp.where(few, _cut(logits, jnp.ones_like(logits), fewest), cut)

    return jax.lax.cond(jnp.any(few), by_rank, lambda: cut)


def _among(wanted: Bool[Array, " b"], find: Callable[[Int[Array, " t"]], Float[Array, " t"]]) -> Float[Array, " b"]:
    """Return the result of `find` for the rows `wanted`, -inf for the others, which take no time on a CPU.

    On a CPU `find` runs on tiles of a few rows, on other platforms on all rows at once if any is wanted.
    """
    b, size = wanted.shape[0], _ROWS_TOGETHER

    def all_at_once() -> Float[Array, " b"]:
        # not a loop of at most one iteration: XLA hoists its invariant code, and runs that with no iteration too
        every, nothing = jnp.arange(b, dtype=jnp.int32), jnp.full(b, -jnp.inf, jnp.float32)
        return jax.lax.cond(jnp.any(wanted), lambda: find(every), lambda: nothing)

    def in_tiles() -> Float[Array, " b"]:
        padding = jnp.full(-b % size, b, jnp.int32)
        order = jnp.concatenate([jnp.argsort(~wanted).astype(jnp.int32), padding])

        def ask(i: Int[Array, ""], found: Float[Array, " b"]) -> Float[Array, " b"]:
            rows = jax.lax.dynamic_slice_in_dim(order, i * size, size)
            return found.at[rows].set(find(jnp.minimum(rows, b - 1)), mode="drop")

        tiles = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
        return jax.lax.fori_loop(0, tiles, ask, jnp.full(b, -jnp.inf, jnp.float32))

    found = jax.lax.platform_dependent(cpu=in_tiles if b > size else all_at_once, default=all_at_once)
    return jnp.where(wanted, found, -jnp.inf)


def _cut(logits: Float[Array, "b v"], weight: Float[Array, "b v"], goal: Float[Array, " b"]) -> Float[Array, " b"]:
    """Return the greatest logit x of each row such that the tokens with logit >= x weigh at least `goal`."""
    keys = _ordered(logits)

    def halve(_: Int[Array, ""], bounds: tuple[UInt32[Array, " b"], UInt32[Array, " b"]]):
        low, high = bounds  # the weight at or above low reaches the goal; above high it does not
        middle = low + (high - low) // 2 + (high - low) % 2
        reached = total(jnp.where(keys >= middle[:, None], weight, 0.0)) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)))
    return _unordered(low)


def _lowest(logits: Float[Array, "b v"], fine: Callable[[Bool[Array, "b v"]], Bool[Array, " b"]]) -> Float[Array, " b"]:
    """Return the least logit x of each row such that the tokens with logit >= x are `fine`; otherwise the greatest.

    `fine` must be monotone: a set that is fine stays so without its least tokens.
    """
    keys = _ordered(logits)

    def halve(_: Int[Array, ""], bounds: tuple[UInt32[Array, " b"], UInt32[Array, " b"]]):
        low, high = bounds  # from high on they are fine, or high is the greatest; below low they are not
        middle = low + (high - low) // 2
        good = fine(keys >= middle[:, None])
        return jnp.where(good, low, jnp.minimum(middle + 1, high)), jnp.where(good, middle, high)

    _, high = jax.lax.fori_loop(0, 32, halve, (jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)))
    return jnp.min(jnp.where(keys >= high[:, None], logits, jnp.inf), axis=-1)


def _ordered(x: Float[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Map float32 to integers in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _unordered(keys: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    bits = jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(0x80000000), ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)

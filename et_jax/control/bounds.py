"""Bounds on the attention mass of a block from its stored summaries, without reading its keys.

A block of n tokens with scores s_j = query . key_j, or those after a soft cap, has the mass Z = sum e^{s_j}. Every
function here brackets the scores, or log Z in nats, for each query head and block. They are float32 bounds on the
float32 scores of the stored keys: give `certified` a slack for rounding.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from et_jax.softmax import capped
from et_jax.sums import log_sum_exp, total
from et_jax.types import pytree


@pytree
class Interval:
    """A lower and an upper bound per query head and block."""

    low: Float[Array, "*b g n"]
    high: Float[Array, "*b g n"]


def scores(query: Float[Array, "g d"], key: Float[Array, "n d"]) -> Float[Array, "g n"]:
    """Return query . key in full float32: a multiplication in fewer bits would break every bound."""
    return jnp.einsum(
        "gd,nd->gn", query.astype(jnp.float32), key.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )


def box(query: Float[Array, "g d"], key_min: Float[Array, "n d"], key_max: Float[Array, "n d"]) -> Interval:
    """Return the range of query . key over keys between `key_min` and `key_max` in every channel.

    The upper end is sum_c max(q_c min_c, q_c max_c), Quest's score (Tang et al. 2024).
    """
    up, down = jnp.maximum(query, 0), jnp.minimum(query, 0)
    return Interval(low=scores(up, key_min) + scores(down, key_max), high=scores(up, key_max) + scores(down, key_min))


def capped_scores(score: Interval, mean: Float[Array, "*b g n"], soft_cap: float) -> tuple[Interval, Interval]:
    """Return the range of scores after a soft cap, and that of their mean, from the range and mean before it.

    An empty block has ends of -inf and keeps them. cap(s) = c tanh(s / c) is increasing, so the ends are capped.
    It rises by no more than s does, so with scores from l to u

        cap(u) - (u - mean) <= mean of cap(s_j) <= cap(l) + (mean - l)

    The cap of the mean bounds the mean on neither side: the cap is convex below 0 and concave above.
    """
    valid = jnp.isfinite(score.high)
    low, high = (jnp.where(valid, end, 0.0) for end in (score.low, score.high))
    mean = jnp.clip(mean, low, high)
    least, most = capped(low, soft_cap), capped(high, soft_cap)
    below, above = jnp.maximum(least, most - (high - mean)), jnp.minimum(most, least + (mean - low))
    least, most, below, above = (jnp.where(valid, end, -jnp.inf) for end in (least, most, below, above))
    return Interval(low=least, high=most), Interval(low=below, high=above)


def chord_mass(score: Interval, mean: Float[Array, "g n"], num_tokens: Int[Array, " n"]) -> Interval:
    """Return bounds on log Z, in nats, from the range of the scores and their mean; -inf for an empty block.

    The upper one is the chord, Z <= n [(u - mean) e^l + (mean - l) e^u] / (u - l), never above n e^u; the lower one
    Jensen's, Z >= n e^mean. For a single token l = mean = u, and the bounds are equal.
    """
    mean = jnp.clip(mean, score.low, score.high)
    width = score.high - score.low
    share = jnp.where(width > 0, (mean - score.low) / jnp.where(width > 0, width, 1.0), 1.0)
    chord = score.high + jnp.log(share + (1.0 - share) * jnp.exp(-width))
    return _where_valid(num_tokens, Interval(low=mean, high=chord))


def box_mass(score: Interval, num_tokens: Int[Array, " n"]) -> Interval:
    """Return n e^l <= Z <= n e^u as bounds on log Z, in nats; -inf for an empty block."""
    return _where_valid(num_tokens, score)


def _where_valid(num_tokens: Int[Array, " n"], per_token: Interval) -> Interval:
    valid = num_tokens > 0
    log_count = jnp.log(jnp.maximum(num_tokens, 1).astype(jnp.float32))
    return Interval(
        low=jnp.where(valid, log_count + per_token.low, -jnp.inf),
        high=jnp.where(valid, log_count + per_token.high, -jnp.inf),
    )


def coded_mass(
    query: Float[Array, "g d"],
    codes: Int8[Array, "n s d"],
    scale: Float[Array, "n d"],
    offset: Float[Array, "n d"],
    num_tokens: Int[Array, " n"],
) -> Interval:
    """Return bounds on log Z, in nats, from keys stored as offset + scale * code, each rounded to the nearest.

    A key differs from its code by at most scale / 2 in every channel, a score by at most e = sum_c |q_c| scale_c / 2,
    so log Z is within e of that of the codes. With scale = (max - min) / 255 and offset = min + 128 scale the error is
    1/510 of the box width. Only the first `num_tokens` codes of a block count.
    """
    q = query.astype(jnp.float32)
    error = scores(jnp.abs(q), 0.5 * scale.astype(jnp.float32))
    scaled = q[:, None, :] * scale.astype(jnp.float32)
    score = jnp.einsum("gnd,nsd->gns", scaled, codes.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    counts = jnp.arange(codes.shape[1]) < num_tokens[:, None]
    estimate = scores(q, offset) + jax.nn.logsumexp(score, axis=-1, where=counts)
    valid = num_tokens > 0
    return Interval(low=jnp.where(valid, estimate - error, -jnp.inf), high=jnp.where(valid, estimate + error, -jnp.inf))


def residual_error(
    mass: Interval,
    estimate: Float[Array, "g n"],
    opened: Bool[Array, " n"],
    log_opened: Float[Array, " g"],
    apart: Float[Array, "g n"],
    value_radius: Float[Array, " n"],
) -> Float[Array, " g"]:
    """Return a bound on |o - o~|, o~ the output in which each unread block counts as its mean value.

    With the estimate Z^_b = e^estimate of an unread block's mass, Z_b within [L_b, U_b] of `mass`,
    `apart` = |mean value_b - o~|, and the values of a block within `value_radius` of their mean:

        |o - o~| <= sum_D [U_b radius_b + max(U_b - Z^_b, Z^_b - L_b) apart_b] / (Z_S + sum_D L_b)

    from Z (o - o~) = sum_D (N_b - Z_b mean_b) + sum_D (Z_b - Z^_b)(mean_b - o~). In units of the values. `log_opened`
    is log Z_S, and includes a sink, as Z does.
    """
    unread = jnp.where(opened, -jnp.inf, 0.0)
    top = jnp.maximum(log_opened, jnp.max(mass.high + unread, axis=-1))
    top = jnp.where(jnp.isfinite(top), top, 0.0)[:, None]
    high, low, guess = (jnp.exp(x + unread - top) for x in (mass.high, mass.low, estimate))
    doubt = jnp.maximum(high - guess, guess - low)
    wrong = jnp.where(high > 0, high * value_radius + doubt * apart, 0.0)
    return total(wrong) / (jnp.exp(log_opened - top[:, 0]) + total(low))


def certain_share(
    upper: Float[Array, "g n"], opened: Bool[Array, " n"], log_opened: Float[Array, " g"]
) -> Float[Array, " g"]:
    """Return the certified share of attention mass that was read: Z_S / (Z_S + U_D) for each query head.

    `upper` bounds every block's log Z, and `log_opened` is log Z_S, the log-sum-exp that attention
    returned for the opened blocks, in nats. 1 if every block was read.
    """
    left = log_sum_exp(jnp.where(opened, -jnp.inf, upper))
    return jnp.where(jnp.isneginf(left), 1.0, jax.nn.sigmoid(log_opened - left))

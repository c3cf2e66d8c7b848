"""Entropy and varentropy of a distribution: exact from one mergeable pass, or bracketed from a top-k."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float, Int

from et_jax.sums import rounded, total
from et_jax.types import Number, pytree, static, value

HEAT = (1e-30, 1e37)
"""The range of temperatures that logits are divided by: outside it the quotient of a large logit may be NaN."""


@pytree
class Moments:
    """Float32 sums over a vocabulary, or over one shard of it, that determine entropy and varentropy.

    With u = (z - max) / T: `peak` = max z, `s0` = sum e^u, `s1` = sum u e^u, `s2` = sum u^2 e^u.
    """

    peak: Float[Array, "*b"]
    s0: Float[Array, "*b"]
    s1: Float[Array, "*b"]
    s2: Float[Array, "*b"]


@pytree
class Estimate:
    """An estimate of an entropy and an interval that contains the true one, in nats; equal when exact."""

    entropy: Float[Array, "*b"]
    low: Float[Array, "*b"]
    high: Float[Array, "*b"]


def moments(logits: Float[Array, "*b v"], temperature: Float[Array, "*b"] | float = 1.0) -> Moments:
    """Return the moments of softmax(logits / temperature). Logits of -inf count as absent, even an entire shard."""
    z = logits.astype(jnp.float32)
    peak = jnp.max(z, axis=-1)
    absent = jnp.isneginf(z)
    heat = jnp.clip(jnp.asarray(temperature, jnp.float32), *HEAT)
    u = jnp.where(absent, 0.0, (z - peak[..., None]) / heat[..., None])
    weight = jnp.where(absent, 0.0, jnp.exp(u))
    return Moments(
        peak=peak,
        s0=total(weight),
        s1=total(weight * u),
        s2=total(weight * u * u),
    )


def merge(a: Moments, b: Moments, temperature: Float[Array, "*b"] | float = 1.0) -> Moments:
    """Return the moments of two vocabulary shards together; both must be measured at `temperature`.

    Shifting the peak by c T turns the sums into e^c S0, e^c (S1 + c S0) and e^c (S2 + 2c S1 + c^2 S0).
    """
    peak = jnp.maximum(a.peak, b.peak)

    def shifted(m: Moments) -> tuple[Float[Array, "*b"], Float[Array, "*b"], Float[Array, "*b"]]:
        shift = jnp.where(jnp.isneginf(m.peak), 0.0, (m.peak - peak) / temperature)
        scale = jnp.exp(shift)
        return scale * m.s0, scale * (m.s1 + shift * m.s0), scale * (m.s2 + 2 * shift * m.s1 + shift * shift * m.s0)

    a0, a1, a2 = shifted(a)
    b0, b1, b2 = shifted(b)
    return Moments(peak=peak, s0=a0 + b0, s1=a1 + b1, s2=a2 + b2)


def log_normaliser(m: Moments, temperature: Float[Array, "*b"] | float = 1.0) -> Float[Array, "*b"]:
    """Return log sum exp(z / T): subtract it from z / T to get a log-probability."""
    return m.peak / temperature + jnp.log(m.s0)


def log_probabilities(
    logits: Float[Array, "*b v"], m: Moments, temperature: Float[Array, "*b"] | float = 1.0
) -> Float[Array, "*b v"]:
    """Return log softmax(logits / temperature), in nats, from the moments at that temperature.

    The peak is subtracted first, so that rounding does not grow with a constant added to all logits.
    """
    heat = jnp.asarray(temperature, jnp.float32)[..., None]
    return (logits.astype(jnp.float32) - m.peak[..., None]) / heat - jnp.log(m.s0)[..., None]


def surprisal(logits: Float[Array, "*r v"], token: Int[Array, "*r"]) -> Float[Array, "*r"]:
    """Return -log p of each row's token, in nats, under the logits that predicted it."""
    logit = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return log_normaliser(moments(logits)) - logit


def entropy(m: Moments) -> Float[Array, "*b"]:
    """Return H = log S0 - S1 / S0, in nats, never below zero."""
    return jnp.maximum(jnp.log(m.s0) - m.s1 / m.s0, 0.0)


def varentropy(m: Moments) -> Float[Array, "*b"]:
    """Return V = S2 / S0 - (S1 / S0)^2, in nats^2: the variance of surprisal, and dH / d log T."""
    mean = m.s1 / m.s0
    return jnp.maximum(m.s2 / m.s0 - mean * mean, 0.0)


def exact(m: Moments) -> Estimate:
    """Return the exact entropy, in nats. With logits at hand it costs one pass, so it is the default."""
    h = entropy(m)
    return Estimate(entropy=h, low=h, high=h)


def top_k(log_prob: Float[Array, "*b k"], num_tokens: int, error: Float[Array, "*b"] | float = 0.0) -> Estimate:
    """Return the entropy of the k likeliest tokens renormalised, H^(k) = -sum p~ log p~, in nats.

    `log_prob` contains their log-probabilities under the full vocabulary of `num_tokens`, in any order, each with an
    error of at most `error` nats and the rounding of its dtype. Never above the true entropy but for rounding: the
    renormalised tokens majorise the full distribution. Raises ValueError for more log-probabilities than tokens.
    Source: Entropic-Time Inference, section 2.1.
    """
    p = jnp.exp(log_prob.astype(jnp.float32))
    low, high = _interval(log_prob, num_tokens)
    truncated = total(entr(p / total(p)[..., None]))
    return _widened(truncated, low, high, log_prob, num_tokens, error)


def tail_corrected(
    log_prob: Float[Array, "*b k"],
    num_tokens: int,
    upper_share: Number = 1.0,
    error: Float[Array, "*b"] | float = 0.0,
) -> Estimate:
    """Return low + `upper_share` * (high - low) of the interval that the k likeliest tokens allow, in nats.

    Share 1 is the paper's H_UB = P_k H^(k) + h_b(eps) + eps log(V - k), the tail spread evenly: conservative,
    for pruning. It is never below H^(k), so max(H^(k), H_UB) is H_UB. Share 1/2 minimises the greatest error,
    for control. The rest is as in `top_k`. Source: Entropic-Time Inference, section 2.1, whose lower
    bound and choice between the bounds are not legible; the sharp lower bound of `_interval` is used.
    """
    low, high = _interval(log_prob, num_tokens)
    return _widened(low + upper_share * (high - low), low, high, log_prob, num_tokens, error)


def normaliser_error(m: Moments, log_prob: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Return the error of each log-probability, in nats, from rounding of its normaliser and its logit.

    A log-probability is the difference of a logit and of log sum e^z, each off by half an eps of its size, at most
    |peak| + log V: twice each, counting the division by a temperature and the logarithm. A sum of V
    exponentials, each off by their arguments' eps, at most log V in the mean, adds the rounding of its additions
    (`_additions`). Requires moments at a temperature of at least 1, or a `log_prob` computed relative to the peak
    (`log_probabilities`).
    """
    num_tokens = log_prob.shape[-1]
    return _eps(log_prob) * (2 * jnp.abs(m.peak) + 2 * math.log(num_tokens) + 2) + _U * _additions(num_tokens)


def _interval(log_prob: Float[Array, "*b k"], num_tokens: int) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Return the least and the greatest entropy, in nats, of `num_tokens` tokens of which these k are the likeliest.

    H = -sum_k p log p - eps log eps + eps H_tail, eps the tail's mass. H_tail is greatest when the tail
    is even, log(V - k); it is least when the tail is concentrated on as few tokens as possible, each with at most
    the least listed probability: with c = min p / eps, n = floor(1 / c) and r = 1 - n c it is
    -n c log c - r log r (majorisation).
    """
    k = log_prob.shape[-1]
    if k > num_tokens:
        raise ValueError(f"log_prob lists {k} tokens; a vocabulary of num_tokens={num_tokens} has at most that many")
    p = jnp.exp(log_prob.astype(jnp.float32))
    tail = jnp.clip(1.0 - total(p), 0.0, 1.0)
    head = total(entr(p)) + entr(tail)
    num_tail = max(num_tokens - k, 1)
    share = jnp.clip(jnp.min(p, axis=-1) / jnp.maximum(tail, jnp.finfo(jnp.float32).tiny), 1.0 / num_tail, 1.0)
    full = jnp.floor(1.0 / share)
    least = rounded(full * entr(share)) + entr(jnp.maximum(1.0 - rounded(full * share), 0.0))
    high = head + rounded(tail * jnp.log(jnp.float32(num_tail)))
    return jnp.minimum(head + rounded(tail * least), high), high


_U = 2.0**-24
"""The unit roundoff of float32: the greatest relative rounding error."""


def _eps(x: Float[Array, "..."]) -> float:
    """Return the machine epsilon of the dtype, at least that of float32."""
    return max(float(jnp.finfo(x.dtype).eps), 2 * _U)


def _additions(count: int) -> int:
    """Return the most additions that a term goes through in a sum of positive terms: XLA sums in runs of 32."""
    return min(count, 32 * math.ceil(math.log(max(count, 2), 32)))


def _widened(
    estimate: Float[Array, "*b"],
    low: Float[Array, "*b"],
    high: Float[Array, "*b"],
    log_prob: Float[Array, "*b k"],
    num_tokens: int,
    error: Float[Array, "*b"] | float,
) -> Estimate:
    """Return the estimate with its interval widened by the possible rounding errors.

    A probability p = e^l has a relative error of `error`, of eps |l| of its dtype, and of a few u = 2^-24 of the
    exponential. Summed over the listed tokens, and over a tail of tokens no likelier than they, |l| adds at most
    `high`: masses are off by at most e = error + eps (high + 2) + (additions + 4) u. A mass of m among V tokens adds
    at most m (log V - log m) of entropy, so an error of e in the tail's moves an end by at most e (log V + max(1,
    -log e)); errors e_i of p_i move -sum p log p by at most sum e_i (|l_i| + 1), and so by e (log V + 3). No entropy
    is below 0 or above log V.
    """
    k = log_prob.shape[-1]
    most = math.log(num_tokens)
    off = error + _eps(log_prob) * (high + 2) + (_additions(k) + 4) * _U
    margin = rounded(off * (2 * most + 3 + jnp.maximum(1.0, -jnp.log(off))))
    return Estimate(
        entropy=estimate, low=jnp.maximum(low - margin, 0.0), high=jnp.minimum(high + margin, most * (1 + 4 * _U))
    )


Estimator = Callable[[Float[Array, "*b v"], Moments], Estimate]
"""Entropy from the log-probabilities of the full vocabulary, or from the moments they were normalised by."""


@value
class ExactEstimator:
    """The exact entropy."""

    def __call__(self, log_prob: Float[Array, "*b v"], m: Moments) -> Estimate:
        return exact(m)


@value
class TopKEstimator:
    """`top_k` of the k likeliest tokens."""

    k: int = static(default=64)

    def __call__(self, log_prob: Float[Array, "*b v"], m: Moments) -> Estimate:
        return top_k(_likeliest(log_prob, self.k), log_prob.shape[-1], normaliser_error(m, log_prob))


@value
class TailCorrectedEstimator:
    """`tail_corrected` from the k likeliest tokens. The paper gives no k; 64 of 50,000 have most of the mass."""

    k: int = static(default=64)
    upper_share: Number = 1.0

    def __call__(self, log_prob: Float[Array, "*b v"], m: Moments) -> Estimate:
        listed, error = _likeliest(log_prob, self.k), normaliser_error(m, log_prob)
        return tail_corrected(listed, log_prob.shape[-1], self.upper_share, error)


def _likeliest(log_prob: Float[Array, "*b v"], k: int) -> Float[Array, "*b k"]:
    return jax.lax.top_k(log_prob, min(k, log_prob.shape[-1]))[0]


def margin(logits: Float[Array, "*b v"], m: Moments) -> Float[Array, "*b"]:
    """Return the difference of the two greatest logits, in nats; 0 if both are equal."""
    z = logits.astype(jnp.float32)
    first = z >= m.peak[..., None]
    second = jnp.max(jnp.where(first, -jnp.inf, z), axis=-1)
    return jnp.where(jnp.sum(first, axis=-1) > 1, 0.0, m.peak - second)

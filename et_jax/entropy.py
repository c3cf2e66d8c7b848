"""How uncertain a distribution is: entropy and varentropy from one mergeable pass over the logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.types import pytree


@pytree
class Moments:
    """Float32 sums over a vocabulary, or over one shard of it, from which entropy and varentropy follow.

    With u = (z - max) / T: `peak` = max z, `s0` = sum e^u, `s1` = sum u e^u, `s2` = sum u^2 e^u.
    """

    peak: Float[Array, "*b"]
    s0: Float[Array, "*b"]
    s1: Float[Array, "*b"]
    s2: Float[Array, "*b"]


def moments(logits: Float[Array, "*b v"], temperature: Float[Array, "*b"] | float = 1.0) -> Moments:
    """Return the moments of softmax(logits / temperature). Logits of -inf count as absent."""
    z = logits.astype(jnp.float32)
    peak = jnp.max(z, axis=-1)
    u = (z - peak[..., None]) / jnp.asarray(temperature, jnp.float32)[..., None]
    weight = jnp.exp(u)
    u = jnp.where(jnp.isneginf(u), 0.0, u)
    return Moments(
        peak=peak,
        s0=jnp.sum(weight, axis=-1),
        s1=jnp.sum(weight * u, axis=-1),
        s2=jnp.sum(weight * u * u, axis=-1),
    )


def log_normaliser(m: Moments, temperature: Float[Array, "*b"] | float = 1.0) -> Float[Array, "*b"]:
    """Return log sum exp(z / T): subtract it from z / T to get a log-probability."""
    return m.peak / temperature + jnp.log(m.s0)


def entropy(m: Moments) -> Float[Array, "*b"]:
    """Return H = log S0 - S1 / S0, in nats, never below zero."""
    return jnp.maximum(jnp.log(m.s0) - m.s1 / m.s0, 0.0)


def varentropy(m: Moments) -> Float[Array, "*b"]:
    """Return V = S2 / S0 - (S1 / S0)^2, in nats^2: the variance of surprisal, and dH / d log T."""
    mean = m.s1 / m.s0
    return jnp.maximum(m.s2 / m.s0 - mean * mean, 0.0)

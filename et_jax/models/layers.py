"""The pieces of a transformer layer: linear maps, RMS norm, rotary positions, gated feed-forward.

The axis letter `r` is the rotary pairs of a head: half of the channels that are turned.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from et_jax.models.config import Activation, ClampedSwish, Rope
from et_jax.models.weights import Matrix
from et_jax.sums import total


def linear(x: Float[Array, "*b i"], weight: Matrix, bias: Float[Array, " o"] | None = None) -> Float[Array, "*b o"]:
    """Return `x @ weight.T + bias`, accumulated in float32, in the dtype of `x`."""
    y = weight.matmul(x)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*b w"], weight: Float[Array, " w"], eps: float, offset: float = 0.0
) -> Float[Array, "*b w"]:
    """Return `x / sqrt(mean(x^2) + eps) * (offset + weight)`, computed in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    scaled = x32 * jax.lax.rsqrt(total(x32 * x32)[..., None] / x.shape[-1] + eps)
    factor = weight.astype(jnp.float32)
    return (scaled * (factor + offset if offset else factor)).astype(x.dtype)


def feed_forward(
    x: Float[Array, "*b w"], gate: Matrix, up: Matrix, down: Matrix, activation: Activation = "silu"
) -> Float[Array, "*b w"]:
    """Return `down(activation(gate(x)) * up(x))` (Shazeer 2020: SwiGLU, or GEGLU by the tanh approximation)."""
    return linear(gated(linear(x, gate), linear(x, up), x.dtype, activation), down)


def gated(
    gate: Float[Array, "*b f"], up: Float[Array, "*b f"], dtype: DTypeLike, activation: Activation = "silu"
) -> Float[Array, "*b f"]:
    """Return `activation(gate) * up`, each factor rounded to `dtype`; `ClampedSwish` says how that opens."""
    opening = gate.astype(dtype).astype(jnp.float32)
    if isinstance(activation, ClampedSwish):
        opening = jnp.minimum(opening, activation.limit)
        opened = opening * jax.nn.sigmoid(activation.alpha * opening)
        beside = jnp.clip(up.astype(dtype).astype(jnp.float32), -activation.limit, activation.limit) + 1
        return opened.astype(dtype) * beside.astype(dtype)
    opened = jax.nn.silu(opening) if activation == "silu" else jax.nn.gelu(opening, approximate=True)
    return opened.astype(dtype) * up.astype(dtype)


def rope_frequencies(rope: Rope) -> tuple[Float[Array, " r"], float]:
    """Return the rotary frequencies (radians per position) and the factor on cosines and sines.

    Formulas: Su et al. 2021; `llama3` as published with Llama 3.1; `yarn` from Peng et al. 2023, section 3; `longrope`
    from Ding et al. 2024, its rotation scaled by sqrt(1 + log(factor) / log(original length)).
    """
    d, scaling = rope.dim, rope.scaling
    frequencies = rope.theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    if scaling is None:
        return frequencies, 1.0
    original, factor = scaling.original_max_positions, scaling.attention_factor
    if scaling.kind == "longrope":
        each = scaling.long_factors if rope.max_positions > original else scaling.short_factors
        if factor is None:
            factor = math.sqrt(1 + math.log(scaling.factor) / math.log(original)) if scaling.factor > 1 else 1.0
        return frequencies / jnp.asarray(each, jnp.float32), factor
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed, 1.0
    if scaling.kind == "llama3":
        rotations = original * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = jnp.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * slowed, 1.0

    def channel(rotations: float) -> float:  # the channel that turns this often over the trained length
        turns = original / (rotations * 2 * math.pi)
        return d * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    ramp = jnp.clip((jnp.arange(d // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return (1.0 - ramp) * frequencies + ramp * slowed, factor


def rope_angles(
    rope: Rope | None, dim: int, positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
    """Return the cosines and sines of every position, float32; of no rotation, those of angle 0 over `dim` channels.

    A turn by 0 leaves every bit as it is, so that layers which know no positions are traced with the others.
    """
    if rope is None:
        still = jnp.zeros((*positions.shape, dim // 2), jnp.float32)
        return jnp.ones_like(still), still
    frequencies, factor = rope_frequencies(rope)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "b t h d"], cosine: Float[Array, "b t r"], sine: Float[Array, "b t r"]
) -> Float[Array, "b t h d"]:
    """Return `x` turned by its positions; channel i is paired with channel i + r (Hugging Face's order).

    Channels from 2 r on are left as they are.
    """
    r = cosine.shape[-1]
    first, second, rest = jnp.split(x, (r, 2 * r), axis=-1)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    turned = (first * cosine - second * sine).astype(x.dtype), (second * cosine + first * sine).astype(x.dtype)
    return jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)

"""The pieces of a transformer layer: linear maps, RMS norm, rotary positions, gated feed-forward.

The axis letter `r` is the rotary pairs of a head: half the head dim.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from et_jax.models.config import ModelConfig
from et_jax.models.weights import Weight
from et_jax.sums import total


def linear(x: Float[Array, "*b i"], weight: Weight, bias: Float[Array, " o"] | None = None) -> Float[Array, "*b o"]:
    """Return `x @ weight.T + bias`, accumulated in float32, in the dtype of `x`."""
    y = weight.matmul(x)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def rms_norm(x: Float[Array, "*b w"], weight: Float[Array, " w"], eps: float) -> Float[Array, "*b w"]:
    """Return `x / sqrt(mean(x^2) + eps) * weight`, computed in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    scaled = x32 * jax.lax.rsqrt(total(x32 * x32)[..., None] / x.shape[-1] + eps)
    return (scaled * weight.astype(jnp.float32)).astype(x.dtype)


def feed_forward(x: Float[Array, "*b w"], gate: Weight, up: Weight, down: Weight) -> Float[Array, "*b w"]:
    """Return `down(silu(gate(x)) * up(x))` (Shazeer 2020, SwiGLU)."""
    return linear(gated(linear(x, gate), linear(x, up), x.dtype), down)


def gated(gate: Float[Array, "*b f"], up: Float[Array, "*b f"], dtype: DTypeLike) -> Float[Array, "*b f"]:
    """Return `silu(gate) * up`, each factor rounded to `dtype`."""
    return jax.nn.silu(gate.astype(dtype).astype(jnp.float32)).astype(dtype) * up.astype(dtype)


def rope_frequencies(config: ModelConfig) -> tuple[Float[Array, " r"], float]:
    """Return the rotary frequencies (radians per position) and the factor on cosines and sines.

    Formulas: Su et al. 2021; `llama3` as published with Llama 3.1; `yarn` from Peng et al. 2023, section 3.
    """
    d, scaling = config.head_dim, config.rope_scaling
    frequencies = config.rope_theta ** (-jnp.arange(0, d, 2, dtype=jnp.float32) / d)
    if scaling is None:
        return frequencies, 1.0
    slowed = frequencies / scaling.factor
    if scaling.kind == "linear":
        return slowed, 1.0
    if scaling.kind == "llama3":
        rotations = scaling.original_max_positions * frequencies / (2 * math.pi)
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = jnp.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
        return keep * frequencies + (1.0 - keep) * slowed, 1.0

    def channel(rotations: float) -> float:  # the channel that turns this often over the trained length
        turns = scaling.original_max_positions / (rotations * 2 * math.pi)
        return d * math.log(turns) / (2 * math.log(config.rope_theta))

    low = max(math.floor(channel(scaling.beta_fast)), 0)
    high = min(math.ceil(channel(scaling.beta_slow)), d - 1)
    ramp = jnp.clip((jnp.arange(d // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return (1.0 - ramp) * frequencies + ramp * slowed, factor


def rope_angles(
    config: ModelConfig, positions: Int[Array, "b t"]
) -> tuple[Float[Array, "b t r"], Float[Array, "b t r"]]:
    """Return the cosines and sines of every position, float32."""
    frequencies, factor = rope_frequencies(config)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "b t h d"], cosine: Float[Array, "b t r"], sine: Float[Array, "b t r"]
) -> Float[Array, "b t h d"]:
    """Return `x` turned by its positions; channel i is paired with channel i + d/2 (Hugging Face's order)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine[:, :, None], sine[:, :, None]
    return jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1).astype(x.dtype)

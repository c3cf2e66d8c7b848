"""Keys and values in 8 bits: what stands for the numbers of a token in a cache, and what they are read as.

The key and the value of a token in one KV head have a scale each. Nothing here knows pages, but for their axes.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Shaped

from et_jax.pallas.checks import EIGHT_BITS

NAMED_8_BITS = dict(zip(("int8", "fp8"), EIGHT_BITS, strict=True))
"""The dtypes of a cache in 8 bits, by the names that callers give them; "fp8" has 4 bits of exponent, 3 of mantissa."""
LARGEST = dict(zip(EIGHT_BITS, (127.0, 448.0), strict=True))
"""The largest number that a cache of each of these dtypes holds."""


def dtype_named(name: str) -> jnp.dtype:
    """Return the dtype of a cache by the name that callers give it."""
    return NAMED_8_BITS.get(name) or jnp.dtype(name)


def dtype_name(dtype: DTypeLike) -> str:
    """Return the name that callers give a dtype of a cache."""
    return {dtype: name for name, dtype in NAMED_8_BITS.items()}.get(jnp.dtype(dtype), jnp.dtype(dtype).name)


def quantized(x: Float[Array, "*b d"], dtype: DTypeLike) -> tuple[Shaped[Array, "*b d"], Float[Array, "*b"]]:
    """Return keys or values in 8 bits, each divided by its scale and rounded to the nearest, and the scales.

    Of what is not finite the scale alone tells.
    """
    # said in words: a rounding to bfloat16 that is widened again XLA leaves out, in one program and not in another
    given, largest = jnp.finfo(x.dtype), LARGEST[jnp.dtype(dtype)]
    x = jax.lax.reduce_precision(x.astype(jnp.float32), given.nexp, given.nmant)
    scale = jnp.max(jnp.abs(x), axis=-1) / largest
    is_finite = jnp.isfinite(scale)
    numbers = x / jnp.where(is_finite & (scale > 0), scale, 1.0)[..., None]
    numbers = jnp.clip(jnp.where(is_finite[..., None], numbers, 0.0), -largest, largest)
    return (jnp.round(numbers) if jnp.issubdtype(dtype, jnp.integer) else numbers).astype(dtype), scale


def scaled(x: Shaped[Array, "*p s d"], scale: Float[Array, "*p s"] | None) -> Shaped[Array, "*p s d"]:
    """Return keys or values as they are read: those of a cache in 8 bits in float32."""
    return x if scale is None else x.astype(jnp.float32) * scale[..., None]


def dequantized(
    pages: Float[Array, "k *p s e"] | Int8[Array, "k *p s e"], kv_scales: Float[Array, "k *p 2 s"] | None, head_dim: int
) -> Float[Array, "k *p s e"]:
    """Return tokens as they are read: those of a cache in 8 bits in float32."""
    if kv_scales is None:
        return pages
    of_key, of_value = kv_scales[..., 0, :, None], kv_scales[..., 1, :, None]
    return pages.astype(jnp.float32) * jnp.where(jnp.arange(pages.shape[-1]) < head_dim, of_key, of_value)

"""Keys and values in 8 bits: the stored codes and scales of a token, and the values they are read as.

The key and the value of a token in one KV head have a scale each. Nothing here depends on pages, except their axes.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8, Shaped

from et_jax.pallas.checks import EIGHT_BITS

NAMED_8_BITS = dict(zip(("int8", "fp8"), EIGHT_BITS, strict=True))
"""The 8-bit dtypes of a cache, by their public names; "fp8" has 4 bits of exponent, 3 of mantissa."""
LARGEST = dict(zip(EIGHT_BITS, (127.0, 448.0), strict=True))
"""The largest number of each of these dtypes."""


def dtype_named(name: str) -> jnp.dtype:
    """Return the dtype of a cache by its public name."""
    return NAMED_8_BITS.get(name) or jnp.dtype(name)


def dtype_name(dtype: DTypeLike) -> str:
    """Return the public name of a dtype of a cache."""
    return {dtype: name for name, dtype in NAMED_8_BITS.items()}.get(jnp.dtype(dtype), jnp.dtype(dtype).name)


def quantized(x: Float[Array, "*b d"], dtype: DTypeLike) -> tuple[Shaped[Array, "*b d"], Float[Array, "*b"]]:
    """Return keys or values in 8 bits, each divided by its scale and rounded to the nearest, and the scales.

    Only the scale shows that an input is not finite.
    """
    # explicit: XLA removes a rounding to bfloat16 that is widened again, in one program and not in another
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

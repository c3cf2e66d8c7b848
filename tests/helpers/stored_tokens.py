"""Keys and values as a cache holds them, by the formula alone."""

import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def as_stored(x, dtype):
    """Return `x`, whose last axis is a key or a value, as it is read from a cache of this dtype.

    In 8 bits, c = x / scale rounded to the nearest with scale = max |x| / largest; read as c scale in float32.
    """
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        return x.astype(dtype).astype(x.dtype)
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) / LARGEST[name]
    code = jnp.where(scale == 0, 0.0, x / scale)
    code = jnp.round(code) if name == "int8" else code
    return code.astype(dtype).astype(jnp.float32) * scale

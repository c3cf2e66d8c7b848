"""Checks of the arguments of the paged kernels, made while tracing."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

FLOATS = (jnp.float32, jnp.bfloat16)
# The dtypes of a pool with token scales; both convert to bfloat16 exactly.
EIGHT_BITS = (jnp.dtype(jnp.int8), jnp.dtype(jnp.float8_e4m3fn))
# The columns of a TPU register, and its rows.
LANES = 128
SUBLANES = 8


def wider(*dtypes: DTypeLike) -> np.dtype:
    """Return the widest of the dtypes, which products of queries and pages use."""
    return max(map(jnp.dtype, dtypes), key=lambda dtype: dtype.itemsize)


def padded_width(head_dim: int) -> int:
    """Return the columns of a cached token: its key and its value, padded to full lanes."""
    return -(-2 * head_dim // LANES) * LANES


def code_rows(page_size: int, head_dim: int) -> tuple[int, int]:
    """Return the rows of a page's 8-bit key codes and their width: full lanes of full tokens, else a single row."""
    size, width = page_size * head_dim, math.lcm(head_dim, LANES)
    return (1, size) if size % width else (size // width, width)


def require(holds: bool, argument: str, got: object, wanted: str) -> None:
    """Raise ValueError naming the argument, what it got and what it wanted, unless `holds`."""
    if not holds:
        raise ValueError(f"{argument}: got {got}, wanted {wanted}")


def require_shape(argument: str, array: Array, shape: tuple[int | None, ...], letters: str) -> None:
    """Raise ValueError unless the shape matches; None stands for any size."""
    fits = len(array.shape) == len(shape) and all(
        want is None or got == want for got, want in zip(array.shape, shape, strict=True)
    )
    sizes = ", ".join(
        letter if size is None else f"{letter}={size}" for letter, size in zip(letters.split(), shape, strict=True)
    )
    require(fits, argument, f"shape {array.shape}", f"({sizes})")


def require_integers(argument: str, array: Array) -> None:
    """Raise ValueError unless the array is int32, the only index type that every backend takes."""
    require(array.dtype == jnp.int32, argument, array.dtype, "int32")


def require_pool(q: Array, pages: Array, head_axis: int, kv_scales: Array | None = None) -> None:
    """Raise ValueError unless queries and pages agree in dtype, head count and token width; 8-bit pages need scales."""
    require(q.dtype in FLOATS, "q", q.dtype, "float32 or bfloat16")
    if kv_scales is None:
        require(pages.dtype in FLOATS, "pages", pages.dtype, "float32 or bfloat16, or 8 bits with kv_scales")
    else:
        require(pages.dtype in EIGHT_BITS, "pages", pages.dtype, "int8 or float8_e4m3fn, because kv_scales are given")
    require_shape("pages", pages, (None, None, None, None), "k p s e")
    if kv_scales is not None:
        require_shape("kv_scales", kv_scales, (*pages.shape[:2], 2, pages.shape[2]), "k p 2 s")
        require(kv_scales.dtype == jnp.float32, "kv_scales", kv_scales.dtype, "float32")
    num_heads, d = q.shape[head_axis], q.shape[-1]
    k, _, _, e = pages.shape
    require(num_heads % k == 0, "q", f"{num_heads} query heads", f"a multiple of the {k} KV heads of pages")
    require(e >= 2 * d, "pages", f"token width {e}", f"at least {2 * d}, a key and a value of {d}")
    require(e % LANES == 0, "pages", f"token width {e}", f"a multiple of {LANES}")


def require_counts(config: Any) -> None:
    """Raise ValueError unless every integer field of a configuration is at least 1."""
    for name, value in vars(config).items():
        require(not isinstance(value, int) or value is False or value >= 1, name, value, "at least 1")

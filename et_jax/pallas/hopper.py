"""Shared code of the kernels for Hopper GPUs (compute capability 9.0): memory layouts and supported shapes."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from et_jax.pallas.checks import EIGHT_BITS

LOG2_E = math.log2(math.e)  # the hardware's exponential has base 2
# The layout from which wgmma reads bfloat16 in shared memory without bank conflicts.
LAYOUT = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
# The same width of memory in 8 bits, which are converted to bfloat16 before the product.
LAYOUT_8_BITS = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
TILE = 64  # tokens of a bulk copy: the rows of one wgmma
SHARE = 128  # columns that LAYOUT_8_BITS places side by side
HEAD_DIMS = (64, 128, 256)  # multiples of the columns of LAYOUT, so that keys end where values begin
SHARED = 227 * 1024  # bytes of shared memory of a multiprocessor


def tile_bytes(width: int, dtype: DTypeLike = jnp.bfloat16) -> int:
    """Return the bytes of the keys and values of one tile, with their scales if in 8 bits."""
    scales = 4 * 2 * TILE if jnp.dtype(dtype) in EIGHT_BITS else 0
    return TILE * width * jnp.dtype(dtype).itemsize + scales


def product(rows: Any, transposed: Any, simulated: bool) -> Float[Array, "x y"]:
    """Return rows "x z" @ transposed "y z" transposed in float32, from shared memory.

    simulated: use a plain product, because interpret mode has no wgmma with transposed operands.
    """
    if simulated:
        result = jnp.dot(rows[...], transposed[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # unlike a wgmma's, these reads must be fenced from the next copy into this buffer
        return result

    def accumulate(sum_ref):
        plgpu.wgmma(sum_ref, rows, transposed.transpose((1, 0)))
        return sum_ref[...]

    return pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((rows.shape[0], transposed.shape[0]), jnp.float32))


def store(ref: Any, value: Array) -> None:
    """Store, one element at a time if the value's register layout has no wider store into the buffer.

    JAX 0.12 requires an explicit argument for that; 0.11 has no such argument.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def load(ref: Any, layout: Any = plgpu.Layout.WGMMA) -> Array:
    """Load in the layout of a product's rows, one element at a time if there is no wider load."""
    index = () if hasattr(plgpu, "store") else ((),)  # JAX 0.11 requires one
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def below(row: Float[Array, " s"], shape: tuple[int, int]) -> Float[Array, "x s"]:
    """Return the row broadcast along a new first axis."""
    return lax.broadcast_in_dim(row, shape, [1])


def beside(column: Float[Array, " r"], shape: tuple[int, int]) -> Float[Array, "r x"]:
    """Return the column broadcast along a new last axis."""
    return lax.broadcast_in_dim(column, shape, [0])


def convert(floats_ref: Any, tile_ref: Any) -> None:
    """Store a tile of 8 bits as bfloat16, in parts small enough to leave registers for the sums."""
    for column in range(0, tile_ref.shape[1], SHARE):
        share = pl.ds(column, SHARE)
        numbers = load(tile_ref.at[:, share])
        if numbers.dtype != jnp.int8:  # 8-bit floats convert to bfloat16 only through wider ones
            numbers = numbers.astype(jnp.float32)
        store(floats_ref.at[:, share], numbers.astype(jnp.bfloat16))
    plgpu.commit_smem()  # wgmma must see the store, and the next copy into the tile must not overtake the reads


def refuse_unsupported(q: Float[Array, "*b d"], pages: Array) -> None:
    """Raise NotImplementedError for queries and pages that the kernels do not support."""
    d = q.shape[-1]
    _, _, s, e = pages.shape
    reasons = {
        f"multiplies bfloat16, not {q.dtype} queries with {pages.dtype} pages": not (
            q.dtype == jnp.bfloat16 and (pages.dtype == jnp.bfloat16 or pages.dtype in EIGHT_BITS)
        ),
        f"reads pages of entire tiles of {TILE} tokens, not of {s}": s % TILE != 0,
        f"is laid out for head dims of {_listed(HEAD_DIMS)}, not {d}": d not in HEAD_DIMS,
        f"reads tokens of {2 * d} columns, a key and a value, not of {e}": e != 2 * d,
    }
    for reason, holds in reasons.items():
        if holds:
            raise unsupported(reason)


def unsupported(reason: str) -> NotImplementedError:
    """Return the error for an unsupported case; `reason` completes the sentence `backend "gpu" ...`."""
    return NotImplementedError(f'backend "gpu" {reason}: use "xla"')


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"

"""What the shapes of all kernels share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.pallas.checks import padded_width
from et_jax.softmax import Softmax

DRAWN_PAGES = 1024  # a larger pool repeats these: drawing all takes minutes
# Keyword arguments that several shapes share.
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
LARGE: dict[str, Any] = BFLOAT16 | {"tested": False}
INT8, FP8 = ({"in_8_bits": dtype} for dtype in ("int8", "float8_e4m3fn"))
CAPPED: dict[str, Any] = {"soft_cap": 5.0, "sinks": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One case. tested: small enough for the tests on a CPU; the others are for benchmarks and compile checks."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str = "float32"
    tested: bool = True

    @property
    def width(self) -> int:
        """Width of a cached token, key and value, or of a page's summary, two keys: padded to whole lanes."""
        return padded_width(self.head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape(Shape):
    """A case of attention.

    in_8_bits: the dtype of a pool in 8 bits, with a scale for the key and the value of each token; None for that of
        the queries.
    """

    in_8_bits: str | None = None
    soft_cap: float | None = None
    window: int | None = None
    sinks: bool = False

    def softmax(self, rng: np.random.Generator | None = None) -> Softmax:
        """Return the settings of the softmax, with random sinks where the shape has some and numbers are drawn."""
        sinks = jnp.asarray(rng.standard_normal(self.num_heads, np.float32)) if self.sinks and rng else None
        return Softmax(scale=self.head_dim**-0.5, soft_cap=self.soft_cap, window=self.window, sink_logits=sinks)


def maker[S: Shape](kind: type[S], last: str) -> Callable[..., S]:
    """Return a function that makes a shape of its name, heads and KV heads, head dim, page size and `last` field."""

    def shape(name: str, heads: tuple[int, int], head_dim: int, page_size: int, value: Any, **rest: Any) -> S:
        sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim, "page_size": page_size}
        return kind(name=name, **sizes, **{last: value}, **rest)

    return shape


def listed(
    shape: Shape, num_blocks: int, lengths: list[int], rng: np.random.Generator, open_share: float
) -> tuple[jax.Array, jax.Array]:
    """Return random lists "b k n" of the blocks that hold so many tokens of each slot, and their lengths "b k"."""
    blocks = np.zeros((len(lengths), shape.num_kv_heads, num_blocks), np.int32)
    counts = np.zeros(blocks.shape[:2], np.int32)
    for row, head in np.ndindex(*counts.shape):
        open_mask = rng.random(-(-lengths[row] // shape.page_size)) < open_share
        open_mask[-1:] = True  # the last block is always listed
        counts[row, head] = open_mask.sum()
        blocks[row, head, : counts[row, head]] = np.flatnonzero(open_mask)
    return jnp.asarray(blocks), jnp.asarray(counts)


def normal(shape: Shape, rng: np.random.Generator) -> Callable[..., jax.Array]:
    """Return a function that draws normal numbers of a size, in the shape's dtype."""

    def draw(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32).astype(jnp.dtype(shape.dtype)))

    return draw


def pool(shape: AttentionShape, num_pages: int, rng: np.random.Generator) -> tuple[jax.Array, jax.Array | None]:
    """Return random pages "k p s e" in the dtype of the pool and, in 8 bits, their scales "k p 2 s"."""
    scales, drawn = None, min(num_pages, DRAWN_PAGES)
    pages = normal(shape, rng)(shape.num_kv_heads, drawn, shape.page_size, shape.width)
    if shape.in_8_bits is not None:
        pages = jnp.clip(40 * pages.astype(jnp.float32), -127, 127)
        pages = (jnp.round(pages) if shape.in_8_bits == "int8" else pages).astype(shape.in_8_bits)
        sizes = shape.num_kv_heads, num_pages, 2, shape.page_size
        scales = jnp.asarray(rng.uniform(0.01, 0.04, sizes), jnp.float32)
    return (pages if num_pages <= DRAWN_PAGES else pages[:, np.arange(num_pages) % DRAWN_PAGES]), scales


def scattered(num_pages: int, slots: int, rng: np.random.Generator) -> jax.Array:
    """Return a page table "b n" whose pages lie anywhere in the pool but for page 0."""
    return jnp.asarray(rng.permutation(num_pages - 1).reshape(slots, -1) + 1, jnp.int32)

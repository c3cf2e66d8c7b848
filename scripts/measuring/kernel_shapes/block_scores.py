"""The named shapes of `block_scores` and `code_scores`: one list, for tests and benchmarks alike."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from et_jax.pallas.checks import code_rows
from scripts.measuring.kernel_shapes import base
from scripts.measuring.kernel_shapes.base import BFLOAT16, LARGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(base.Shape):
    """One case.

    lengths: tokens a row; 0 is an empty slot. spare: blocks a slot has room for beyond its longest row.
    dtype: of the queries and the boxes, as the cache's pages have it; mean keys are float32.
    """

    lengths: tuple[int, ...]
    spare: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks a slot can hold."""
        return max(1, -(-max(self.lengths) // self.page_size)) + self.spare

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that are no arrays."""
        return {"page_size": self.page_size, "scale": self.head_dim**-0.5}


def example(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Return random arguments of both functions: summaries of pages scattered over the pool, and any codes."""
    rng = np.random.default_rng(seed)
    b, k, n, d = len(shape.lengths), shape.num_kv_heads, shape.num_blocks, shape.head_dim
    num_pages = 1 + b * n
    corners = rng.standard_normal((2, k, num_pages, d), np.float32).astype(jnp.dtype(shape.dtype))
    low, high = np.minimum(*corners), np.maximum(*corners)
    between = rng.random((k, num_pages, d), np.float32)
    mean = low.astype(np.float32) + between * (high.astype(np.float32) - low.astype(np.float32))
    value = rng.standard_normal((k, num_pages, shape.width - d), np.float32)
    box = np.pad(np.concatenate([low, high], axis=-1), ((0, 0), (0, 0), (0, shape.width - 2 * d)))
    codes = rng.integers(-128, 128, (k, num_pages, *code_rows(shape.page_size, d)), np.int8)
    return {
        "q": base.normal(shape, rng)(b, shape.num_heads, d),
        "key_box": jnp.asarray(box),
        "mean": jnp.asarray(np.concatenate([mean, value], axis=-1)),
        "key_codes": jnp.asarray(codes),
        "page_table": base.scattered(num_pages, b, rng),
        "lengths": jnp.asarray(shape.lengths, jnp.int32),
    }


shape = base.maker(Shape, "lengths")
SHAPES = (
    # query heads a KV head, and KV heads
    shape("group_1", (4, 4), 16, 16, (37, 64)),
    shape("group_3", (9, 3), 64, 16, (129, 250)),
    shape("group_4", (8, 2), 64, 16, (40, 300), **BFLOAT16),
    shape("group_8", (8, 1), 128, 16, (77, 20)),
    shape("heads_8", (32, 8), 128, 16, (90, 33), **BFLOAT16),
    # head dims
    shape("dim_96", (4, 2), 96, 16, (61, 30)),
    shape("dim_256", (2, 1), 256, 16, (45, 17), **BFLOAT16),
    # page sizes
    shape("page_64", (4, 2), 64, 64, (600, 200), **BFLOAT16),
    shape("page_128", (4, 2), 64, 128, (513, 128)),
    # lengths: one token, empty slots, room to spare, more blocks than a group or a row of lanes
    shape("one_token", (6, 2), 64, 16, (1, 1)),
    shape("empty_slots", (6, 2), 64, 16, (0, 40, 0)),
    shape("all_empty", (6, 2), 64, 16, (0, 0)),
    shape("spare", (4, 2), 128, 16, (31, 100), spare=5),
    shape("many_blocks", (4, 2), 16, 8, (8 * 150, 1, 8 * 129), **BFLOAT16),
    shape("hopper_dim_128", (4, 2), 128, 64, (130, 0, 64), **BFLOAT16),
    # pages whose codes fill tiles on a TPU
    shape("codes_group_3", (12, 4), 64, 16, (129, 0, 250), **BFLOAT16),
    shape("codes_dim_96", (4, 4), 96, 32, (61, 30)),
    shape("codes_many_blocks", (4, 2), 128, 8, (8 * 150, 1, 8 * 129), **BFLOAT16),
    # what is run, on a device
    shape("llama3_8b_64_at_32k", (32, 8), 128, 128, (32768,) * 64, **LARGE),
    shape("llama3_8b_8_at_128k", (32, 8), 128, 128, (131072,) * 8, **LARGE),
    shape("bundled_64_at_32k", (4, 2), 64, 128, (32768,) * 64, **LARGE),
    shape("bundled_8_at_128k", (4, 2), 64, 128, (131072,) * 8, **LARGE),
)
TESTED = tuple(shape for shape in SHAPES if shape.tested)

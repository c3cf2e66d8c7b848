"""The named shapes of `paged_prefill`: one list, for tests and benchmarks alike."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from scripts.measuring.kernel_shapes import base
from scripts.measuring.kernel_shapes.base import BFLOAT16, CAPPED, FP8, INT8, LARGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(base.AttentionShape):
    """One case.

    chunk: new queries a row. starts: tokens before the chunk, a number for each row.
    open_share: the chance that a KV head lists a block; the last block is always listed. None: no lists, dense.
    block_lse: whether block sums are asked for.
    """

    chunk: int
    starts: tuple[int, ...] = (0,)
    open_share: float | None = None
    block_lse: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks a slot can hold, enough for the longest row."""
        return -(-(max(self.starts) + self.chunk) // self.page_size)

    @property
    def settings(self) -> dict[str, bool]:
        """The keyword arguments that are no trees of arrays."""
        return {"block_lse": self.block_lse}


def example(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Return random arguments of this shape, pages scattered over the pool, a list for each KV head where wanted."""
    rng = np.random.default_rng(seed)
    b, n = len(shape.starts), shape.num_blocks
    num_pages = 1 + b * n
    pages, kv_scales = base.pool(shape, num_pages, rng)
    blocks = counts = None
    if shape.open_share is not None:
        lengths = [start + shape.chunk for start in shape.starts]
        blocks, counts = base.listed(shape, n, lengths, rng, shape.open_share)
    return {
        "q": base.normal(shape, rng)(b, shape.chunk, shape.num_heads, shape.head_dim),
        "pages": pages,
        "page_table": base.scattered(num_pages, b, rng),
        "starts": jnp.asarray(shape.starts, jnp.int32),
        "blocks": blocks,
        "counts": counts,
        "softmax": shape.softmax(rng),
        "kv_scales": kv_scales,
    }


ALL: Any = CAPPED | {"starts": (600, 290), "window": 300}
shape = base.maker(Shape, "chunk")
SHAPES = (
    # the query groups, head dims and page sizes
    shape("group_1", (2, 2), 16, 16, 32),
    shape("group_3", (9, 3), 64, 16, 64, starts=(40,)),
    shape("group_4_bfloat16", (8, 2), 64, 16, 64, starts=(300,), **BFLOAT16),
    shape("group_16", (16, 1), 64, 16, 16, starts=(5,)),
    shape("dim_96", (4, 2), 96, 32, 24, starts=(17,)),
    shape("dim_128", (4, 1), 128, 64, 48, starts=(100,)),
    shape("dim_256", (2, 1), 256, 16, 20),
    shape("page_128", (4, 2), 64, 128, 130, starts=(500,)),
    # rows that begin far apart, one query, a chunk longer than a step of the loop
    shape("ragged", (4, 2), 64, 16, 40, starts=(0, 700, 33)),
    shape("one_query", (4, 2), 64, 16, 1, starts=(99, 0)),
    shape("long_chunk", (4, 2), 64, 16, 300, starts=(10,), **BFLOAT16),
    # what changes the scores
    shape("window", (4, 2), 64, 16, 40, starts=(700, 0), window=50),
    shape("window_of_one", (4, 2), 64, 16, 20, starts=(30,), window=1),
    shape("soft_cap", (4, 2), 64, 16, 40, starts=(30,), soft_cap=2.0),
    shape("sinks", (4, 2), 64, 16, 40, starts=(30,), sinks=True),
    shape("all_of_them", (8, 2), 64, 16, 60, **ALL),
    shape("all_of_them_bfloat16", (8, 2), 64, 16, 60, starts=(90,), window=70, **BFLOAT16, **CAPPED),
    # lists, over several steps of the loop, and block sums
    shape("block_sums", (4, 2), 64, 32, 40, starts=(100, 0), block_lse=True),
    shape("listed", (4, 2), 96, 32, 24, starts=(300,), open_share=0.4),
    shape("sparse", (9, 3), 64, 16, 40, starts=(700, 300), open_share=0.3, block_lse=True),
    shape("sparse_all_of_them", (8, 2), 64, 16, 60, open_share=0.5, block_lse=True, **ALL),
    # pools in 8 bits
    shape("int8", (4, 2), 64, 32, 40, starts=(100, 0), block_lse=True, **INT8),
    shape("int8_all_of_them", (8, 2), 128, 32, 60, open_share=0.5, block_lse=True, **BFLOAT16, **INT8, **ALL),
    shape("fp8_dim_96", (4, 2), 96, 32, 24, starts=(17,), **FP8),
    # pages of 64 and 128 tokens in bfloat16, which the Hopper kernel reads: groups, head dims, several blocks, edges
    shape("hopper_group_1", (2, 2), 128, 64, 40, starts=(30,), **BFLOAT16),
    shape("hopper_group_3", (6, 2), 64, 128, 70, starts=(500,), **BFLOAT16),
    shape("hopper_group_16", (16, 1), 64, 64, 20, starts=(5,), **BFLOAT16),
    shape("hopper_dim_256", (2, 1), 256, 64, 20, starts=(100,), **BFLOAT16),
    shape("hopper_ragged", (4, 2), 64, 64, 40, starts=(0, 700, 33), **BFLOAT16),
    shape("hopper_one_query", (4, 2), 64, 64, 1, starts=(99, 0), **BFLOAT16),
    shape("hopper_long_chunk", (4, 2), 64, 64, 300, starts=(10,), **BFLOAT16),
    shape("hopper_window", (4, 2), 64, 64, 40, starts=(700, 0), window=50, **BFLOAT16),
    shape("hopper_window_of_one", (4, 2), 64, 128, 20, starts=(130,), window=1, **BFLOAT16),
    shape("hopper_all_of_them", (8, 2), 64, 128, 60, **BFLOAT16, **ALL),
    shape("hopper_block_sums", (4, 2), 64, 64, 40, starts=(100, 0), block_lse=True, **BFLOAT16),
    shape("hopper_sparse", (8, 2), 64, 64, 40, starts=(700, 90), open_share=0.4, block_lse=True, **BFLOAT16),
    shape("hopper_sparse_all_of_them", (4, 1), 128, 128, 60, open_share=0.6, block_lse=True, **BFLOAT16, **ALL),
    shape("hopper_int8", (8, 2), 64, 64, 40, starts=(700, 90), open_share=0.4, block_lse=True, **BFLOAT16, **INT8),
    shape("hopper_fp8", (4, 1), 128, 128, 90, starts=(110,), **BFLOAT16, **FP8),
    # what is run, on a device
    shape("smollm_135m", (9, 3), 64, 16, 256, starts=(1024,), **LARGE),
    shape("llama3_8b", (32, 8), 128, 128, 512, starts=(7680,), **LARGE),
    shape("qwen3_8b", (32, 8), 128, 128, 512, starts=(32256,), **LARGE),
    shape("mistral_7b", (32, 8), 128, 128, 512, starts=(7680,), window=4096, **LARGE),
    shape("chunk_at_128k", (32, 8), 128, 128, 512, starts=(130560,), **LARGE),
    shape("chunk_at_32k_eighth", (32, 8), 128, 128, 512, starts=(32256,), open_share=0.125, block_lse=True, **LARGE),
)
TESTED = tuple(shape for shape in SHAPES if shape.tested)

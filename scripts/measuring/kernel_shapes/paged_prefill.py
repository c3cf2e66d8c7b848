"""The named shapes of `paged_prefill`: one list, for tests and benchmarks alike."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.measuring.kernel_shapes import base


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

    normal = base.normal(shape, rng)
    pages, kv_scales = base.scaled(shape, base.pool(shape, num_pages, rng), num_pages, rng)
    blocks, counts = (None, None) if shape.open_share is None else lists(shape, rng, shape.open_share)
    return {
        "q": normal(b, shape.chunk, shape.num_heads, shape.head_dim),
        "pages": base.repeated(pages, num_pages),
        "page_table": base.scattered(num_pages, b, rng),
        "starts": jnp.asarray(shape.starts, jnp.int32),
        "blocks": blocks,
        "counts": counts,
        "softmax": shape.softmax(rng),
        "kv_scales": kv_scales,
    }


def lists(shape: Shape, rng: np.random.Generator, open_share: float) -> tuple[jax.Array, jax.Array]:
    """Return random lists "b k n" of the blocks that hold a row's tokens, and their lengths "b k"."""
    return base.listed(shape, shape.num_blocks, [start + shape.chunk for start in shape.starts], rng, open_share)


def _shape(name: str, heads: tuple[int, int], head_dim: int, page_size: int, chunk: int, **rest) -> Shape:
    num_heads, num_kv_heads = heads
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "page_size": page_size}
    return Shape(name=name, chunk=chunk, **sizes, **rest)


SHAPES = (
    # the query groups, head dims and page sizes
    _shape("group_1", (2, 2), 16, 16, 32),
    _shape("group_3", (9, 3), 64, 16, 64, starts=(40,)),
    _shape("group_4_bfloat16", (8, 2), 64, 16, 64, starts=(300,), dtype="bfloat16"),
    _shape("group_16", (16, 1), 64, 16, 16, starts=(5,)),
    _shape("dim_96", (4, 2), 96, 32, 24, starts=(17,)),
    _shape("dim_96_bfloat16", (4, 2), 96, 16, 24, starts=(17,), dtype="bfloat16"),
    _shape("dim_128", (4, 1), 128, 64, 48, starts=(100,)),
    _shape("dim_256", (2, 1), 256, 16, 20),
    _shape("page_128", (4, 2), 64, 128, 130, starts=(500,)),
    # rows that begin far apart, one query, a chunk longer than a step of the loop
    _shape("ragged", (4, 2), 64, 16, 40, starts=(0, 700, 33)),
    _shape("one_query", (4, 2), 64, 16, 1, starts=(99, 0)),
    _shape("long_chunk", (4, 2), 64, 16, 300, starts=(10,), dtype="bfloat16"),
    # what changes the scores
    _shape("window", (4, 2), 64, 16, 40, starts=(700, 0), window=50),
    _shape("window_of_one", (4, 2), 64, 16, 20, starts=(30,), window=1),
    _shape("soft_cap", (4, 2), 64, 16, 40, starts=(30,), soft_cap=2.0),
    _shape("sinks", (4, 2), 64, 16, 40, starts=(30,), sinks=True),
    _shape("all_of_them", (8, 2), 64, 16, 60, starts=(600, 290), window=300, soft_cap=5.0, sinks=True),
    _shape(
        "all_of_them_bfloat16", (8, 2), 64, 16, 60, starts=(90,), window=70, soft_cap=5.0, sinks=True, dtype="bfloat16"
    ),
    # lists, over several steps of the loop, and block sums
    _shape("block_sums", (4, 2), 64, 32, 40, starts=(100, 0), block_lse=True),
    _shape("listed", (4, 2), 96, 32, 24, starts=(300,), open_share=0.4),
    _shape("sparse", (9, 3), 64, 16, 40, starts=(700, 300), open_share=0.3, block_lse=True),
    _shape("sparse_bfloat16", (8, 2), 128, 16, 24, starts=(500, 0), open_share=0.5, block_lse=True, dtype="bfloat16"),
    _shape(
        "sparse_all_of_them",
        (8, 2),
        64,
        16,
        60,
        starts=(600, 290),
        open_share=0.5,
        block_lse=True,
        window=300,
        soft_cap=5.0,
        sinks=True,
    ),
    # pools in 8 bits
    _shape("int8", (4, 2), 64, 32, 40, starts=(100, 0), block_lse=True, in_8_bits="int8"),
    _shape(
        "int8_all_of_them",
        (8, 2),
        128,
        32,
        60,
        starts=(600, 290),
        open_share=0.5,
        block_lse=True,
        dtype="bfloat16",
        window=300,
        soft_cap=5.0,
        sinks=True,
        in_8_bits="int8",
    ),
    _shape("fp8_dim_96", (4, 2), 96, 32, 24, starts=(17,), in_8_bits="float8_e4m3fn"),
    # pages of 64 and 128 tokens in bfloat16, which the Hopper kernel reads: groups, head dims, several blocks, edges
    _shape("hopper_group_1", (2, 2), 128, 64, 40, starts=(30,), dtype="bfloat16"),
    _shape("hopper_group_3", (6, 2), 64, 128, 70, starts=(500,), dtype="bfloat16"),
    _shape("hopper_group_16", (16, 1), 64, 64, 20, starts=(5,), dtype="bfloat16"),
    _shape("hopper_dim_256", (2, 1), 256, 64, 20, starts=(100,), dtype="bfloat16"),
    _shape("hopper_ragged", (4, 2), 64, 64, 40, starts=(0, 700, 33), dtype="bfloat16"),
    _shape("hopper_one_query", (4, 2), 64, 64, 1, starts=(99, 0), dtype="bfloat16"),
    _shape("hopper_long_chunk", (4, 2), 64, 64, 300, starts=(10,), dtype="bfloat16"),
    _shape("hopper_window", (4, 2), 64, 64, 40, starts=(700, 0), window=50, dtype="bfloat16"),
    _shape("hopper_window_of_one", (4, 2), 64, 128, 20, starts=(130,), window=1, dtype="bfloat16"),
    _shape(
        "hopper_all_of_them",
        (8, 2),
        64,
        128,
        60,
        starts=(600, 290),
        dtype="bfloat16",
        window=300,
        soft_cap=5.0,
        sinks=True,
    ),
    _shape("hopper_block_sums", (4, 2), 64, 64, 40, starts=(100, 0), block_lse=True, dtype="bfloat16"),
    _shape("hopper_sparse", (8, 2), 64, 64, 40, starts=(700, 90), open_share=0.4, block_lse=True, dtype="bfloat16"),
    _shape(
        "hopper_sparse_all_of_them",
        (4, 1),
        128,
        128,
        60,
        starts=(600, 290),
        open_share=0.6,
        block_lse=True,
        dtype="bfloat16",
        window=300,
        soft_cap=5.0,
        sinks=True,
    ),
    _shape(
        "hopper_int8",
        (8, 2),
        64,
        64,
        40,
        starts=(700, 90),
        open_share=0.4,
        block_lse=True,
        dtype="bfloat16",
        in_8_bits="int8",
    ),
    _shape("hopper_fp8", (4, 1), 128, 128, 90, starts=(110,), dtype="bfloat16", in_8_bits="float8_e4m3fn"),
    # what is run, on a device
    _shape("smollm_135m", (9, 3), 64, 16, 256, starts=(1024,), dtype="bfloat16", tested=False),
    _shape("llama3_8b", (32, 8), 128, 128, 512, starts=(7680,), dtype="bfloat16", tested=False),
    _shape("qwen3_8b", (32, 8), 128, 128, 512, starts=(32256,), dtype="bfloat16", tested=False),
    _shape("mistral_7b", (32, 8), 128, 128, 512, starts=(7680,), dtype="bfloat16", window=4096, tested=False),
    _shape("chunk_at_128k", (32, 8), 128, 128, 512, starts=(130560,), dtype="bfloat16", tested=False),
    _shape(
        "chunk_at_32k_eighth",
        (32, 8),
        128,
        128,
        512,
        starts=(32256,),
        open_share=0.125,
        block_lse=True,
        dtype="bfloat16",
        tested=False,
    ),
)
TESTED = tuple(shape for shape in SHAPES if shape.tested)

"""The named shapes of `paged_attention`: one list, for tests and benchmarks alike."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from scripts.measuring.kernel_shapes import base
from scripts.measuring.kernel_shapes.base import BFLOAT16, CAPPED, FP8, INT8, LARGE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(base.AttentionShape):
    """One case.

    lengths: tokens a slot, those of its rows included; 0 is an empty slot.
    rows: of a slot, the last at its end, each before it a token earlier; of three and more the second sees nothing.
    read_apart: a listed block is read by some rows of its slot.
    open_share: the chance that a KV head lists a block; the last block is always listed.
    """

    lengths: tuple[int, ...]
    open_share: float = 1.0
    rows: int = 1
    read_apart: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of a slot, enough for the longest row."""
        return max(1, -(-max(self.lengths) // self.page_size))

    @property
    def settings(self) -> dict[str, int]:
        """The keyword arguments that are no trees of arrays."""
        return {"rows_per_slot": self.rows}

    @property
    def row_lengths(self) -> list[int]:
        """What each row sees, slot by slot."""
        seen = [[max(0, length - back) for back in reversed(range(self.rows))] for length in self.lengths]
        return [0 if self.rows >= 3 and row == 1 else each for slot in seen for row, each in enumerate(slot)]


def example(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Return random arguments of this shape: pages scattered over the pool, a list for each KV head."""
    rng = np.random.default_rng(seed)
    b, n = len(shape.lengths), shape.num_blocks
    num_pages = 1 + b * n
    blocks, counts = base.listed(shape, n, list(shape.lengths), rng, shape.open_share)
    pages, kv_scales = base.pool(shape, num_pages, rng)
    readers = jnp.asarray(rng.integers(1, 1 << shape.rows, blocks.shape), jnp.int32) if shape.read_apart else None
    return {
        "q": base.normal(shape, rng)(b * shape.rows, shape.num_heads, shape.head_dim),
        "pages": pages,
        "page_table": base.scattered(num_pages, b, rng),
        "blocks": blocks,
        "counts": counts,
        "lengths": jnp.asarray(shape.row_lengths, jnp.int32),
        "softmax": shape.softmax(rng),
        "readers": readers,
        "kv_scales": kv_scales,
    }


HOPPER: Any = BFLOAT16 | CAPPED
APART: Any = {"rows": 3, "read_apart": True}
shape = base.maker(Shape, "lengths")
SHAPES = (
    # the query groups: 1 to 16 query heads a KV head
    shape("group_1", (4, 4), 16, 16, (37, 64)),
    shape("group_2", (4, 2), 64, 16, (100, 3), **BFLOAT16),
    shape("group_3", (9, 3), 64, 16, (129, 250)),
    shape("group_4", (8, 2), 64, 16, (40, 300), **BFLOAT16),
    shape("group_8", (8, 1), 128, 16, (77, 20)),
    shape("group_16", (16, 1), 64, 16, (50, 49)),
    # head dims, keys gathered with their values and apart
    shape("dim_96", (4, 2), 96, 16, (61, 30)),
    shape("dim_96_bfloat16", (4, 2), 96, 32, (61, 30), **BFLOAT16),
    shape("dim_128_bfloat16", (4, 2), 128, 64, (130, 64), **BFLOAT16),
    shape("dim_256", (2, 1), 256, 16, (45, 17)),
    shape("dim_256_bfloat16", (2, 1), 256, 16, (45, 17), **BFLOAT16),
    # page sizes
    shape("page_32", (4, 2), 64, 32, (257, 31)),
    shape("page_64", (4, 2), 64, 64, (600, 200), **BFLOAT16),
    shape("page_128", (4, 2), 64, 128, (513, 128)),
    # lengths: one token, empty slots, whole pages, one row
    shape("one_token", (6, 2), 64, 16, (1, 1)),
    shape("empty_slots", (6, 2), 64, 16, (0, 40, 0)),
    shape("all_empty", (6, 2), 64, 16, (0, 0)),
    shape("whole_pages", (6, 2), 64, 16, (256, 512)),
    shape("one_row", (6, 2), 64, 16, (300,), **BFLOAT16),
    # a list for each KV head, over several steps of the loop
    shape("sparse", (9, 3), 64, 16, (1000, 700), open_share=0.3),
    shape("sparse_wide", (8, 4), 128, 32, (900, 30), open_share=0.4),
    # what changes the scores
    shape("window", (4, 2), 64, 16, (300, 20, 55), window=50),
    shape("window_of_one", (4, 2), 128, 16, (33, 16), window=1),
    shape("soft_cap", (4, 2), 64, 16, (90, 33), soft_cap=2.0),
    shape("sinks", (4, 2), 64, 16, (90, 0, 33), sinks=True),
    shape("all_of_them", (8, 2), 64, 16, (500, 90), window=200, open_share=0.5, **CAPPED),
    shape("all_of_them_bfloat16", (8, 2), 96, 16, (500, 9), window=70, **BFLOAT16, **CAPPED),
    # pools in 8 bits
    shape("int8", (6, 2), 64, 16, (300, 0, 77), open_share=0.6, **INT8),
    shape("int8_bfloat16", (8, 2), 128, 32, (200, 90), **BFLOAT16, **INT8),
    shape("int8_all_of_them", (8, 2), 96, 16, (500, 90), window=200, **INT8, **CAPPED),
    shape("fp8_dim_96", (4, 2), 96, 32, (61, 300), open_share=0.5, sinks=True, **FP8),
    shape("fp8_page_64", (4, 2), 128, 64, (130, 64), **BFLOAT16, **FP8),
    # pages of 64 and 128 tokens in bfloat16, which the Hopper kernel reads: groups, head dims, several parts, edges
    shape("hopper_group_1", (2, 2), 128, 64, (65, 200), **BFLOAT16),
    shape("hopper_group_3", (6, 2), 64, 128, (129, 250), **BFLOAT16),
    shape("hopper_group_9", (9, 1), 64, 64, (150, 64), **BFLOAT16),
    shape("hopper_group_16", (16, 1), 64, 128, (300, 1), **BFLOAT16),
    shape("hopper_dim_256", (4, 2), 256, 64, (150, 64), **BFLOAT16),
    shape("hopper_parts", (4, 1), 64, 64, (3000, 1025), **BFLOAT16),
    shape("hopper_parts_128", (2, 1), 128, 128, (2200, 1024), open_share=0.7, **BFLOAT16),
    shape("hopper_sparse", (8, 2), 64, 64, (1500, 700), open_share=0.4, **BFLOAT16),
    shape("hopper_empty_slots", (4, 2), 64, 64, (0, 70, 0), sinks=True, **BFLOAT16),
    shape("hopper_all_empty", (4, 2), 64, 64, (0, 0), **BFLOAT16),
    shape("hopper_window", (4, 2), 128, 64, (400, 20, 129), window=100, **BFLOAT16),
    shape("hopper_window_of_one", (4, 2), 64, 128, (129, 128), window=1, **BFLOAT16),
    shape("hopper_all_of_them", (8, 2), 64, 64, (1300, 90), window=900, open_share=0.6, **HOPPER),
    shape("hopper_int8_all_of_them", (2, 1), 64, 128, (3300, 0, 90), window=3200, open_share=0.9, **INT8, **HOPPER),
    # several rows a slot, over one list or over the union of theirs
    shape("rows_3", (4, 2), 64, 16, (100, 3), rows=3, **BFLOAT16),
    shape("rows_5", (9, 3), 64, 16, (129, 0, 250), rows=5),
    shape("rows_of_one_query", (2, 2), 128, 16, (40, 90), rows=2, read_apart=True),
    shape("rows_apart", (8, 2), 64, 16, (500, 90), open_share=0.5, rows=4, read_apart=True),
    shape("rows_all_of_them", (8, 2), 96, 16, (500, 90, 9), window=70, open_share=0.6, **APART, **CAPPED),
    shape("rows_int8", (8, 2), 128, 32, (200, 90), rows=5, read_apart=True, **BFLOAT16, **INT8),
    shape("hopper_rows", (8, 2), 128, 64, (300, 70), rows=5, **BFLOAT16),
    shape("hopper_rows_split", (8, 1), 128, 128, (300, 20), rows=6, read_apart=True, **BFLOAT16),
    shape("hopper_rows_all_of_them", (6, 2), 64, 64, (1300, 90), window=300, open_share=0.7, **APART, **HOPPER),
    shape("hopper_rows_int8", (4, 2), 128, 64, (400, 0), rows=2, read_apart=True, **BFLOAT16, **INT8),
    # what is run, on a CPU
    shape("decode_2_at_16k", (32, 8), 128, 64, (16384,) * 2, tested=False),
    shape("decode_2_at_16k_page_16", (32, 8), 128, 16, (16384,) * 2, tested=False),
    # what is run, on a device
    shape("smollm_135m", (9, 3), 64, 16, (2048,) * 16, **LARGE),
    shape("llama3_8b", (32, 8), 128, 128, (8192,) * 16, **LARGE),
    shape("qwen3_8b", (32, 8), 128, 128, (32768,) * 8, **LARGE),
    shape("mistral_7b", (32, 8), 128, 128, (8192,) * 16, window=4096, **LARGE),
    shape("slots_64_at_32k", (32, 8), 128, 128, (32768,) * 64, **LARGE),
    shape("rows_5_at_32k", (32, 8), 128, 128, (32768,) * 16, rows=5, **LARGE),
    shape("rows_5_apart_at_32k", (32, 8), 128, 128, (32768,) * 16, rows=5, read_apart=True, **LARGE),
    shape("slots_8_at_128k", (32, 8), 128, 128, (131072,) * 8, **LARGE),
    shape("slots_64_at_32k_eighth", (32, 8), 128, 128, (32768,) * 64, open_share=0.125, **LARGE),
    shape("slots_8_at_128k_eighth", (32, 8), 128, 128, (131072,) * 8, open_share=0.125, **LARGE),
)
TESTED = tuple(shape for shape in SHAPES if shape.tested)

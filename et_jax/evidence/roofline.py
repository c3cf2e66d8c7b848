"""Bytes and FLOPs of each kernel, and each chip's least time: the larger of bytes / bandwidth and FLOPs / rate.

Published peaks of the chips: TPU v5e 819 GB/s and 197 TFLOP/s, TPU v6e 1640 GB/s and 918 TFLOP/s (Google Cloud TPU
documentation), H200 4800 GB/s and 989 TFLOP/s (NVIDIA data sheet, dense bfloat16). Shapes are one layer of a
Llama-3-8B in bfloat16. No kernel reaches these times; they say how far there is to go.
"""

import dataclasses

from scripts.measuring.results import table

BFLOAT16, FLOAT32 = 2.0, 4.0  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Peak bytes and bfloat16 FLOPs a second, and the page size in tokens used there."""

    name: str
    bandwidth: float
    rate: float
    page_size: int

    def least_seconds(self, work: "Work") -> float:
        """Return the least seconds the work can take."""
        return max(work.num_bytes / self.bandwidth, work.flops / self.rate)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a call must move and compute at least."""

    num_bytes: float
    flops: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer's attention: query heads, KV heads, head dim; rows and tokens each."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    rows: int
    length: int

    @property
    def name(self) -> str:
        """Rows by length."""
        return f"{self.rows} x {self.length // 1024}k"


CHIPS = (
    Chip(name="TPU v5e", bandwidth=819e9, rate=197e12, page_size=128),
    Chip(name="TPU v6e", bandwidth=1640e9, rate=918e12, page_size=128),
    Chip(name="H200", bandwidth=4800e9, rate=989e12, page_size=64),
)
SHAPES = (Shape(rows=64, length=32768), Shape(rows=8, length=131072), Shape(rows=1, length=32768))
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625)
CHUNK = 512


def decode_attention(shape: Shape, share: float) -> Work:
    """Return the work of reading a share of the blocks: every key and value of them once, four FLOPs a channel."""
    tokens = shape.rows * shape.length * share
    return Work(
        num_bytes=tokens * shape.num_kv_heads * 2 * shape.head_dim * BFLOAT16,
        flops=4.0 * tokens * shape.num_heads * shape.head_dim,
    )


def block_scores(shape: Shape, page_size: int) -> Work:
    """Return the work of scoring every block by its summary: the box in bfloat16 and the mean row in float32."""
    blocks = shape.rows * shape.length / page_size
    row = 2 * shape.head_dim
    return Work(
        num_bytes=blocks * shape.num_kv_heads * row * (BFLOAT16 + FLOAT32),
        flops=10.0 * blocks * shape.num_heads * shape.head_dim,
    )


def code_scores(shape: Shape, page_size: int) -> Work:
    """Return the work of bounding every block by its 8-bit codes, read in full beside the box."""
    tokens, blocks = shape.rows * shape.length, shape.rows * shape.length / page_size
    return Work(
        num_bytes=shape.num_kv_heads * shape.head_dim * (tokens + 2 * BFLOAT16 * blocks),
        flops=2.0 * tokens * shape.num_heads * shape.head_dim,
    )


def prefill(shape: Shape) -> Work:
    """Return the work of a chunk at the end of a prompt: keys and values once, the causal triangle left out."""
    keys = shape.length - CHUNK / 2
    return Work(
        num_bytes=shape.length * shape.num_kv_heads * 2 * shape.head_dim * BFLOAT16,
        flops=4.0 * CHUNK * keys * shape.num_heads * shape.head_dim,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Modelled:
    """A model that drafts for itself on a chip: `drafts` tokens a step, the times of a plain step in milliseconds.

    `draft` and `verify` are those of one drafted token's pass and of the step that verifies them, over it; `speed` is
    how much sooner a text is there, where `HELD` of the drafted tokens hold.
    """

    plain: float
    drafts: int
    draft: float
    verify: float
    speed: float


LLAMA_3_8B_WEIGHTS = 8.03e9  # Grattafiori et al. 2024
LAYERS = 32
HELD, READ = 0.9, 0.08  # of drafted tokens, those that hold; of blocks, those that a draft reads
SELF_CONTEXTS = (8192, 32768, 131072)
SELF_ROWS = (1, 8)


def whole_step(shape: Shape, share: float, rows: int = 1) -> Work:
    """Return the work of a step of a Llama-3-8B in bfloat16: weights and a share of the caches once, for so many rows.

    The FLOPs are two for each weight, and four for each channel of a key and value, of every row.
    """
    read = decode_attention(shape, share)
    return Work(
        num_bytes=LLAMA_3_8B_WEIGHTS * BFLOAT16 + LAYERS * read.num_bytes,
        flops=rows * (2.0 * LLAMA_3_8B_WEIGHTS * shape.rows + LAYERS * read.flops),
    )


def self_drafted(chip: Chip, shape: Shape) -> Modelled:
    """Return the best number of drafted tokens for a model that drafts for itself, and what it gains."""
    plain, draft = (chip.least_seconds(whole_step(shape, share)) for share in (1.0, READ))
    found = []
    for drafts in range(17):
        verify = chip.least_seconds(whole_step(shape, 1.0, drafts + 1))
        brought = sum(HELD**ahead for ahead in range(drafts + 1))
        speed = brought * plain / (drafts * draft + verify)
        found.append(
            Modelled(plain=1e3 * plain, drafts=drafts, draft=draft / plain, verify=verify / plain, speed=speed)
        )
    return max(found, key=lambda one: one.speed)


def self_drafting() -> str:
    """Return the table of a model that drafts for itself, for every chip: modelled, not measured."""
    lines = []
    for rows in SELF_ROWS:
        for length in SELF_CONTEXTS:
            shape = Shape(rows=rows, length=length)
            each = [self_drafted(chip, shape) for chip in CHIPS]
            size = whole_step(shape, 1.0).num_bytes / 1e9, whole_step(shape, READ).num_bytes / 1e9
            flops = whole_step(shape, 1.0).flops / 1e9
            told = [f"{one.plain:.1f} ms, {one.drafts} drafted: {one.speed:.2f}" for one in each]
            lines.append([shape.name, *size, flops, *told])
    return table(["rows x tokens", "plain, GB", "draft, GB", "GFLOP a token", *(chip.name for chip in CHIPS)], lines)


def roofline() -> str:
    """Return the table of every kernel, shape and chip."""
    lines = []
    for shape in SHAPES:
        works = {f"decode attention, {share:g} of the blocks": decode_attention(shape, share) for share in SHARES}
        for name, work in works.items():
            lines.append([name, shape.name, work, [chip.least_seconds(work) for chip in CHIPS]])
        for name, scores in (("block scores", block_scores), ("code scores", code_scores)):
            each = [scores(shape, chip.page_size) for chip in CHIPS]
            lines.append([name, shape.name, each[0], [c.least_seconds(w) for c, w in zip(CHIPS, each, strict=True)]])
        if shape.rows == 1:
            work = prefill(shape)
            lines.append([f"prefill, chunk of {CHUNK}", shape.name, work, [chip.least_seconds(work) for chip in CHIPS]])
    header = ["kernel", "rows x tokens", "MB", "GFLOP", *[f"{chip.name}, us" for chip in CHIPS]]
    return table(
        header,
        [
            [name, size, work.num_bytes / 1e6, work.flops / 1e9, *[1e6 * seconds for seconds in times]]
            for name, size, work, times in lines
        ],
    )

"""Chips that are not here as their compilers know them, and the models that are compiled for them, as shapes alone."""

import dataclasses
from typing import Any

from et_jax.models.config import ClampedSwish, ExpertConfig

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip as its compiler knows it, the default page size (tokens) there, and the backend of its own kernels."""

    name: str
    topology: dict[str, Any]
    page_size: int
    backend: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """A decoder to compile: a model's shape, and how many sequences of how many tokens it holds.

    num_layers: of the model, and of the small one.
    quantize: the form of its matrices besides bfloat16.
    cache_dtype: what keys and values are kept in, by the names of `load`.
    control: the preset it reads by; with "off" no page has a summary.
    small: a second model's shape, which takes turns under a control with a switch, else drafts.
    drafts: tokens drafted for a sequence in a step at most; by the model itself where there is no other.
    cache_budget: what a sequence's cache is compressed to, by its last queries; None where it never is.
    functions: those of the decoder that are compiled.
    by_xla: whether it is compiled by XLA's attention too, or by the chip's own kernels alone.
    seldom: chips for which it is compiled only where all programs are asked for: a TPU v6e takes the paths of a v5e,
        and its compiler minutes.
    on: fields that are others on a chip, by its name.
    """

    name: str
    model: dict[str, Any]
    num_slots: int
    max_length: int
    prefill_batch: int
    num_layers: int = 2
    quantize: str | None = None
    cache_dtype: str = "bfloat16"
    control: str = "off"
    small: dict[str, Any] | None = None
    drafts: int = 0
    cache_budget: int | None = None
    functions: tuple[str, ...] = ("step", "decode", "prefill")
    by_xla: bool = True
    seldom: tuple[str, ...] = ()
    on: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def for_chip(self, chip: Chip) -> "Decoding":
        """Return the decoder as it is compiled for a chip."""
        return dataclasses.replace(self, **self.on.get(chip.name, {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """A model as its attention kernels see it, and which of them to compile.

    kernels: "attention" is a decode step, "rows" one of several rows a slot, each with blocks of its own, "prefill" a
        chunk of a prompt, "sparse" a chunk over lists, with block sums; after "int8" or "fp8" over a pool in 8 bits.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    kernels: tuple[str, ...] = ("attention", "prefill")


def tpu(name: str, topology: str) -> Chip:
    """Return a TPU, or a slice of several."""
    return Chip(name=name, topology={"platform": "tpu", "topology_name": topology}, page_size=128, backend="tpu")


_H200 = {"platform": "cuda", "topology_name": "h200", "target_config": H200, "topology": "1x1x1"}
_HOPPER = Chip(name="H200", topology=_H200, page_size=64, backend="gpu")
CHIPS = (tpu("TPU v5e", "v5e:2x2"), tpu("TPU v6e", "v6e:2x2"), _HOPPER)
SMALL = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768}
SMALL |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
LLAMA3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA3_8B |= {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
SMOLLM2_135M = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "tie_embeddings": True}
SMOLLM2_135M |= {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
QWEN3_8B = LLAMA3_8B | {"architecture": "qwen3", "qk_norm": True, "vocab_size": 151936, "intermediate_size": 12288}
LLAMA3_1B = LLAMA3_8B | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
GEMMA2_2B = {
    **{"architecture": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216},
    **{"num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "windows": (4096, None) * 13},
    **{"norm_offset": 1.0, "norms": "around", "activation": "gelu_tanh", "score_cap": 50.0, "logit_cap": 30.0},
    **{"embedding_scale": 48.0, "tie_embeddings": True},
}
GEMMA3_4B = {
    **GEMMA2_2B,
    **{"architecture": "gemma3", "vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240},
    **{"windows": tuple(None if layer % 6 == 5 else 1024 for layer in range(34)), "window_rope_theta": 10000.0},
    **{"qk_norm": True, "score_cap": None, "logit_cap": None, "embedding_scale": 2560**0.5},
}
PHI_4 = {
    **{"architecture": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920},
    **{"num_heads": 40, "num_kv_heads": 10, "head_dim": 128},
}
OLMO2_7B = {
    **LLAMA3_8B,
    **{"architecture": "olmo2", "vocab_size": 100352, "intermediate_size": 11008, "num_kv_heads": 32},
    **{"norms": "after", "qk_norm": True, "qk_norm_over": "width"},
}
QWEN3_30B_A3B = {
    **QWEN3_8B,
    **{"architecture": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_kv_heads": 4},
    "experts": ExpertConfig(num_experts=128, num_per_token=8, width=768, normalised=True, layers=()),
}
LLAMA3_70B = {**LLAMA3_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_heads": 64}
MIXTRAL_8X7B = {
    **LLAMA3_8B,
    **{"architecture": "mixtral", "vocab_size": 32000},
    "experts": ExpertConfig(num_experts=8, num_per_token=2, width=14336, normalised=True, layers=()),
}
_CLAMPED = {"biases": True, "activation": ClampedSwish(alpha=1.702, limit=7.0)}
GPT_OSS_20B = {
    **{"architecture": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880},
    **{"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "windows": (128, None) * 12},
    **{"qkv_bias": True, "o_bias": True, "sinks": True},
    "experts": ExpertConfig(num_experts=32, num_per_token=4, width=2880, normalised=True, layers=(), **_CLAMPED),
}

V5E, V6E, HOPPER = (chip.name for chip in CHIPS)
BOTH, DECODE = ("decode", "prefill"), ("decode",)
LARGE = {"num_slots": 16, "max_length": 32768, "prefill_batch": 512, "by_xla": False}  # by XLA as the small one
MEDIUM = LARGE | {"max_length": 8192}
FITTING = {  # a Llama-3-8B with a cache for which the chip has memory beside the weights
    V5E: {"quantize": "int8", "num_slots": 4, "max_length": 8192},
    V6E: {"num_slots": 4, "max_length": 8192},
}
NO_DECODE = {V5E: {"functions": ("step", "prefill")}}  # for which notebooks are compiled
WHOLE = {"model": LLAMA3_8B, "num_layers": 32, "on": FITTING} | LARGE
WHOLE_QWEN = WHOLE | {"model": QWEN3_8B, "num_layers": 36}
DEEP = LARGE | {"num_slots": 4, "functions": DECODE}
CERTIFIED_8B = LARGE | {"model": LLAMA3_8B, "control": "certified", "functions": BOTH}
ODD = LARGE | {"model": SMOLLM2_135M, "max_length": 7936, "functions": DECODE}  # on an H200 124 pages and 3 query heads
OF_TWO = LARGE | {"model": LLAMA3_8B, "small": LLAMA3_1B, "functions": DECODE}
INFER = {"control": "entropyinfer", "functions": ("prefill",)}
GPT_OSS = MEDIUM | {"model": GPT_OSS_20B, "num_layers": 24, "functions": DECODE}
# A name, the chips for which it is seldom compiled, and the other settings.
_ROWS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("small", (V6E,), {"model": SMALL, "num_slots": 16, "max_length": 32768, "prefill_batch": 256, "on": NO_DECODE}),
    ("llama3_8b, 2 layers", (V5E, V6E, HOPPER), LARGE | {"model": LLAMA3_8B}),
    # slices of TPUs compile the same attention
    ("llama3_8b, 32 layers", (V5E, V6E), WHOLE),
    ("gemma2_2b, 26 layers", (V5E, V6E, HOPPER), DEEP | {"model": GEMMA2_2B, "num_layers": 26, "max_length": 16384}),
    ("gemma3_4b, 34 layers", (V5E, HOPPER), DEEP | {"model": GEMMA3_4B, "num_layers": 34, "max_length": 16384}),
    # TPUs have too little memory for its weights
    ("phi_4, 40 layers", (V5E, V6E), DEEP | {"model": PHI_4, "num_layers": 40, "max_length": 8192}),
    ("olmo2_7b, 32 layers", (V5E, V6E, HOPPER), DEEP | {"model": OLMO2_7B, "num_layers": 32, "max_length": 4096}),
    ("adaptive", (V6E,), WHOLE | {"control": "adaptive", "functions": DECODE}),
    ("share", (V6E,), LARGE | {"model": LLAMA3_8B, "control": "share", "functions": DECODE}),
    # the two read by one kernel
    ("entropyinfer llama3_8b", (V6E, V5E), WHOLE | INFER),
    ("entropyinfer qwen3_8b", (V6E, HOPPER), WHOLE_QWEN | INFER),
    # notebooks compile preset "guarded" for a TPU v5e
    ("last masses", (V5E, V6E, HOPPER), WHOLE | {"control": "paper", "functions": DECODE}),
    # page tables and groups of query heads that are no power of two
    ("smollm2_135m, paper", (V5E, V6E), ODD | {"control": "paper"}),
    ("smollm2_135m, certified", (V5E, V6E), ODD | {"control": "certified"}),
    ("compressed", (V6E,), WHOLE | {"control": "certified", "cache_budget": 1024, "functions": ("decode", "compress")}),
    ("int8 cache", (V5E, V6E, HOPPER), CERTIFIED_8B | {"cache_dtype": "int8"}),
    ("fp8 cache", (V5E, V6E, HOPPER), CERTIFIED_8B | {"cache_dtype": "fp8"}),
    ("self", (V5E, V6E), WHOLE | {"drafts": 8, "functions": DECODE}),
    # TPUs have too little memory for its weights
    ("qwen3_30b_a3b, 48 layers", (V5E, V6E), MEDIUM | {"model": QWEN3_30B_A3B, "num_layers": 48, "functions": DECODE}),
    ("qwen3_30b_a3b", (V5E, V6E, HOPPER), MEDIUM | {"model": QWEN3_30B_A3B, "functions": BOTH}),
    # only an H200 has the memory for its weights, 42 GB; in int8 they are 21 GB, too much for a TPU v5e
    ("gpt_oss_20b, 24 layers", (V5E, V6E, HOPPER), GPT_OSS),
    ("gpt_oss_20b W8A8, 24 layers", (V5E, V6E, HOPPER), GPT_OSS | {"quantize": "int8"}),
    # two layers
    (
        "gpt_oss_20b",
        (V5E, V6E, HOPPER),
        GPT_OSS | {"model": GPT_OSS_20B | {"windows": (128, None)}, "num_layers": 2, "functions": BOTH},
    ),
    # slices of TPUs compile the full depth
    ("mixtral_8x7b", (V5E, V6E), MEDIUM | {"model": MIXTRAL_8X7B, "functions": DECODE}),
    # steps of drafts are compiled for an H200 by "self" and for a TPU v5e by a notebook
    ("drafts", (V5E, V6E, HOPPER), OF_TWO | {"drafts": 4}),
    ("turns", (V6E, V5E), OF_TWO | {"control": "ead_guarded"}),
)
# Kernels that `decode` launches at most on an H200, in a layer and once a step (`aot.launches`), by the names above.
# Lower them as launches go; `aot_check.py` prints what it counts.
KERNELS = {
    "small": (14, 42),
    "llama3_8b, 2 layers": (14, 49),
    "llama3_8b, 32 layers": (14, 49),
    "phi_4, 40 layers": (14, 49),
    "olmo2_7b, 32 layers": (19, 48),
    "gemma2_2b, 26 layers": (19, 49),
    "gemma3_4b, 34 layers": (24, 51),
    "adaptive": (21, 50),
    "share": (20, 50),
    "last masses": (21, 59),
    "smollm2_135m, paper": (22, 55),
    "smollm2_135m, certified": (21, 48),
    "compressed": (23, 52),
    "int8 cache": (26, 50),
    "fp8 cache": (26, 50),
    "self": (26, 24),
    "qwen3_30b_a3b, 48 layers": (37, 50),
    "qwen3_30b_a3b": (37, 50),
    "gpt_oss_20b, 24 layers": (45, 51),
    "gpt_oss_20b W8A8, 24 layers": (41, 51),
    "mixtral_8x7b": (35, 49),
    "drafts": (21, 18),
    "turns": (20, 5),
}
# Those of a layer on a TPU v5e, where a preset selects blocks: operations, one of which summarises full pages.
TPU_KERNELS = {"adaptive": 126, "last masses": 143, "compressed": 116}
# Of those of an H200, loops and conditionals: a loop over the experts that the tokens of a step were sent to, in each
# layer of a pattern that repeats.
CONTROL = {
    **dict.fromkeys(("qwen3_30b_a3b, 48 layers", "qwen3_30b_a3b", "mixtral_8x7b"), 1),
    **dict.fromkeys(("gpt_oss_20b, 24 layers", "gpt_oss_20b W8A8, 24 layers"), 2),
}
DECODINGS = tuple(Decoding(name=name, seldom=seldom, **settings) for name, seldom, settings in _ROWS)
_EIGHT_HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_EVERY = ("attention", "int8 attention", "fp8 attention", "rows", "prefill", "sparse", "int8 sparse")
_FEW = ("attention", "int8 attention", "prefill", "fp8 prefill")
ATTENTIONS = (  # to a kernel Qwen3-8B is Llama-3-8B
    Attention(name="llama3_8b", kernels=_EVERY, **_EIGHT_HEADS),
    Attention(name="mistral_7b", window=4096, **_EIGHT_HEADS),
    Attention(name="bundled", num_heads=4, num_kv_heads=2, head_dim=64, kernels=_FEW),
)

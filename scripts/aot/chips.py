"""Chips that are not here as their compilers know them, and the models that are compiled for them, as shapes alone."""

import dataclasses
from typing import Any

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


CHIPS = (
    Chip(name="TPU v5e", topology={"platform": "tpu", "topology_name": "v5e:2x2"}, page_size=128, backend="tpu"),
    Chip(name="TPU v6e", topology={"platform": "tpu", "topology_name": "v6e:2x2"}, page_size=128, backend="tpu"),
    Chip(
        name="H200",
        topology={"platform": "cuda", "topology_name": "h200", "target_config": H200, "topology": "1x1x1"},
        page_size=64,
        backend="gpu",
    ),
)
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
LLAMA3_8B = {  # all but its 32 layers
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}
QWEN3_8B = LLAMA3_8B | {"architecture": "qwen3", "qk_norm": True, "vocab_size": 151936, "intermediate_size": 12288}
LLAMA3_1B = LLAMA3_8B | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
GEMMA2_2B = {
    "architecture": "gemma2",
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 256,
    "windows": (4096, None) * 13,
    "norm_offset": 1.0,
    "norms": "around",
    "activation": "gelu_tanh",
    "score_cap": 50.0,
    "logit_cap": 30.0,
    "embedding_scale": 48.0,
    "tie_embeddings": True,
}
GEMMA3_4B = GEMMA2_2B | {
    "architecture": "gemma3",
    "vocab_size": 262208,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "windows": tuple(None if layer % 6 == 5 else 1024 for layer in range(34)),
    "window_rope_theta": 10000.0,
    "qk_norm": True,
    "score_cap": None,
    "logit_cap": None,
    "embedding_scale": 2560**0.5,
}
PHI_4 = {
    "architecture": "phi3",
    "vocab_size": 100352,
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_heads": 40,
    "num_kv_heads": 10,
    "head_dim": 128,
}
OLMO2_7B = LLAMA3_8B | {
    "architecture": "olmo2",
    "vocab_size": 100352,
    "intermediate_size": 11008,
    "num_kv_heads": 32,
    "norms": "after",
    "qk_norm": True,
    "qk_norm_over": "width",
}
QWEN3_30B_A3B = QWEN3_8B | {
    "architecture": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_kv_heads": 4,
    "experts": {"num_experts": 128, "num_per_token": 8, "width": 768, "normalised": True},
}
MIXTRAL_8X7B = LLAMA3_8B | {
    "architecture": "mixtral",
    "vocab_size": 32000,
    "experts": {"num_experts": 8, "num_per_token": 2, "width": 14336, "normalised": True},
}
GPT_OSS_20B = {
    "architecture": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_heads": 64,
    "num_kv_heads": 8,
    "head_dim": 64,
    "windows": (128, None) * 12,
    "qkv_bias": True,
    "o_bias": True,
    "sinks": True,
    "experts": {"num_experts": 32, "num_per_token": 4, "width": 2880, "normalised": True, "biases": True}
    | {"clamped": {"alpha": 1.702, "limit": 7.0}},
}

LARGE = {"num_slots": 16, "max_length": 32768, "prefill_batch": 512, "by_xla": False}  # by XLA as the small one
FITTING = {  # a Llama-3-8B with a cache for which the chip has memory beside the weights
    "TPU v5e": {"quantize": "int8", "num_slots": 4, "max_length": 8192},
    "TPU v6e": {"num_slots": 4, "max_length": 8192},
}
WHOLE = {"model": LLAMA3_8B, "num_layers": 32, "on": FITTING} | LARGE
DECODINGS = (
    Decoding(name="small", model=SMALL, num_slots=16, max_length=32768, prefill_batch=256),
    Decoding(name="llama3_8b, 2 layers", model=LLAMA3_8B, seldom=("TPU v5e", "TPU v6e", "H200"), **LARGE),
    Decoding(name="llama3_8b, 32 layers", **WHOLE),
    *(
        Decoding(
            name=name,
            model=model,
            num_slots=4,
            max_length=max_length,
            prefill_batch=512,
            num_layers=num_layers,
            functions=("decode",),
            by_xla=False,
            seldom=seldom,
        )
        for name, model, num_layers, max_length, seldom in (
            ("gemma2_2b, 26 layers", GEMMA2_2B, 26, 16384, ("TPU v5e", "H200")),
            ("gemma3_4b, 34 layers", GEMMA3_4B, 34, 16384, ("TPU v5e", "H200")),
            ("phi_4, 40 layers", PHI_4, 40, 8192, ("TPU v5e", "TPU v6e")),  # whose memories do not hold its weights
            ("olmo2_7b, 32 layers", OLMO2_7B, 32, 4096, ("TPU v5e", "TPU v6e", "H200")),
        )
    ),
    Decoding(name="adaptive", control="adaptive", seldom=("TPU v6e",), **WHOLE),
    *(
        Decoding(
            name=f"entropyinfer {name}",
            control="entropyinfer",
            functions=("prefill",),
            seldom=("TPU v6e", other),  # what the two read by is one kernel
            **WHOLE | {"model": model, "num_layers": num_layers},
        )
        for name, model, num_layers, other in (
            ("llama3_8b", LLAMA3_8B, 32, "TPU v5e"),
            ("qwen3_8b", QWEN3_8B, 36, "H200"),
        )
    ),
    Decoding(name="last masses", control="paper", functions=("decode",), seldom=("TPU v6e", "H200"), **WHOLE),
    Decoding(
        name="compressed",
        control="certified",
        cache_budget=1024,
        functions=("decode", "compress"),
        seldom=("TPU v6e",),
        **WHOLE,
    ),
    *(
        Decoding(
            name=f"{cache_dtype} cache",
            model=LLAMA3_8B,
            cache_dtype=cache_dtype,
            control="certified",
            functions=("decode", "prefill"),
            seldom=seldom,
            **LARGE,
        )
        for cache_dtype, seldom in (("int8", ("TPU v6e", "H200")), ("fp8", ("TPU v5e", "TPU v6e", "H200")))
    ),
    Decoding(name="self", drafts=8, functions=("decode",), seldom=("TPU v5e", "TPU v6e"), **WHOLE),
    Decoding(
        name="qwen3_30b_a3b, 48 layers",
        model=QWEN3_30B_A3B,
        num_slots=16,
        max_length=8192,
        prefill_batch=512,
        num_layers=48,
        functions=("decode",),
        by_xla=False,
        seldom=("TPU v5e", "TPU v6e"),  # whose memory does not hold its weights
    ),
    Decoding(
        name="qwen3_30b_a3b",
        model=QWEN3_30B_A3B,
        num_slots=16,
        max_length=8192,
        prefill_batch=512,
        functions=("decode", "prefill"),
        by_xla=False,
        seldom=("TPU v6e", "H200"),
    ),
    Decoding(
        name="gpt_oss_20b, 24 layers",
        model=GPT_OSS_20B,
        num_slots=16,
        max_length=8192,
        prefill_batch=512,
        num_layers=24,
        functions=("decode",),
        by_xla=False,
        seldom=("TPU v5e", "TPU v6e", "H200"),  # of which the last alone holds its weights, 42 GB
    ),
    Decoding(
        name="gpt_oss_20b W8A8, 24 layers",
        model=GPT_OSS_20B,
        num_slots=16,
        max_length=8192,
        prefill_batch=512,
        num_layers=24,
        quantize="int8",
        functions=("decode",),
        by_xla=False,
        seldom=("TPU v5e", "TPU v6e", "H200"),  # of which the first does not hold its 21 GB
    ),
    Decoding(
        name="gpt_oss_20b",
        model=GPT_OSS_20B | {"windows": (128, None)},
        num_slots=16,
        max_length=8192,
        prefill_batch=512,
        functions=("decode", "prefill"),
        by_xla=False,
        seldom=("TPU v6e", "H200"),  # which take its full depth
    ),
    Decoding(
        name="mixtral_8x7b",
        model=MIXTRAL_8X7B,
        num_slots=16,
        max_length=8192,
        prefill_batch=512,
        functions=("decode",),
        by_xla=False,
        seldom=("TPU v5e", "TPU v6e"),  # slices of which take its full depth
    ),
    *(
        Decoding(
            name=name,
            model=LLAMA3_8B,
            small=LLAMA3_1B,
            functions=("decode",),
            seldom=("TPU v6e", other),
            **LARGE | of_two,
        )
        for name, of_two, other in (  # a step of drafts is compiled for an H200 by "self", in full depth
            ("drafts", {"drafts": 4}, "H200"),
            ("turns", {"control": "ead_guarded"}, "TPU v5e"),
        )
    ),
)
ATTENTIONS = (  # to a kernel Qwen3-8B is Llama-3-8B
    Attention(
        name="llama3_8b",
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        kernels=("attention", "int8 attention", "fp8 attention", "rows", "prefill", "sparse", "int8 sparse"),
    ),
    Attention(name="mistral_7b", num_heads=32, num_kv_heads=8, head_dim=128, window=4096),
    Attention(
        name="bundled",
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        kernels=("attention", "int8 attention", "prefill", "fp8 prefill"),
    ),
)

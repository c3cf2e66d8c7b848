"""GGUF files written from a Hugging Face folder as llama.cpp's converter writes them, by its own library.

Names come from the library's map of tensors and keys from its writer. What the converter does to weights is written
down here from its source (conversion/llama.py, gemma.py, qwen.py): rows of queries and keys are permuted for llama,
granite and smollm3, 1 is added to Gemma's norms, and experts are stacked. A file holds no tokens but their number.
"""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
from ml_dtypes import bfloat16
from safetensors.numpy import load_file

PERMUTED = ("llama", "granite", "smollm3")
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
FORMS = {"float32": "F32", "bfloat16": "BF16", "Q8_0": "Q8_0"}
"""The forms of matrices that peers compare, and what this format calls them."""


def written_once(folder: Path, form: str) -> Path:
    """Return the file of a folder's weights in a form, written beside them on first use."""
    path = folder / f"{FORMS[form]}.gguf"
    if not path.exists():
        write_gguf(path, folder, FORMS[form])
    return path


def write_gguf(file: Path, folder: Path, kind: str = "F32", parts: int = 0) -> None:
    """Write the model in `folder` with its matrices in `kind`; in about so many `parts` if any are asked for."""
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES.get(name := str(config["model_type"]), name)
    writer = gguf.GGUFWriter(file, arch, split_max_tensors=9 if parts else 0)
    add_values(writer, config, arch)
    tensors = load_file(folder / "model.safetensors")
    if config.get("tie_word_embeddings", arch.startswith("gemma")):
        tensors.pop("lm_head.weight", None)
    for name, tensor in converted(tensors, config, arch):
        add_tensor(writer, name, tensor, kind if tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 else "F32")
    close(writer)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: str = "F32") -> None:
    if kind == "F32":
        writer.add_tensor(name, tensor)
        return
    quantised = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(tensor, quantised), raw_dtype=quantised)


def add_values(writer: gguf.GGUFWriter, config: dict, arch: str) -> None:
    heads, width = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    own = rope.get("full_attention", rope)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(own.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    for key, add in (("bos_token_id", writer.add_bos_token_id), ("eos_token_id", writer.add_eos_token_id)):
        if isinstance(config.get(key), int):
            add(config[key])
    kind = own.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
        writer.add_rope_scaling_factor(own["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(own["original_max_position_embeddings"])
        for key, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if own.get(key) is not None:
                add(own[key])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
        writer.add_rope_dimension_count(int(own.get("partial_rotary_factor", 1.0) * width) // heads)
        writer.add_rope_scaling_orig_ctx_len(
            own.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        )
        if kind == "longrope":
            original = config["original_max_position_embeddings"]
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            add_tensor(writer, "rope_factors_long.weight", np.array(own["long_factor"], np.float32))
            add_tensor(writer, "rope_factors_short.weight", np.array(own["short_factor"], np.float32))
    if kind == "llama3":
        add_tensor(writer, "rope_freqs.weight", llama3_factors(own, config))
    if (experts := config.get("num_local_experts") or config.get("num_experts")) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if "moe_intermediate_size" in config:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def llama3_factors(rope: dict, config: dict) -> np.ndarray:
    """Return what each frequency is divided by, as the converter works it out."""
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, factors = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        length = 2 * math.pi * (rope.get("rope_theta") or config["rope_theta"]) ** (i / dim)
        smooth = min(max((original / length - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def converted(tensors: dict[str, np.ndarray], config: dict, arch: str) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the tensors of a file by their names there, in float32."""
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, stored in tensors.items():
        tensor = stored.astype(np.float32) if stored.dtype == bfloat16 else stored
        if found := re.search(r"experts\.(\d+)\.", name):
            experts.setdefault(name.replace(found[0], "experts."), {})[int(found[1])] = tensor
            continue
        if arch in PERMUTED and (found := re.search(r"([qk])_proj\.weight$", name)):
            heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            rows = tensor.reshape(heads, 2, len(tensor) // heads // 2, -1)
            tensor = rows.swapaxes(1, 2).reshape(tensor.shape)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        yield written(names, name), tensor
    for name, by_number in experts.items():
        yield written(names, name), np.stack([by_number[i] for i in sorted(by_number)])


def written(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found

"""The weights of a Hugging Face folder of a plain Llama, as a file that llama.cpp reads.

Needs numpy and `gguf` alone, for it runs where llama.cpp is installed.
"""

import importlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

FORMS = {"float32": "F32", "bfloat16": "BF16", "Q8_0": "Q8_0"}
"""The forms of weights that are written, and what this format calls them."""

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def written(folder: Path, form: str) -> Path:
    """Return the file of a folder's weights in a form, written beside them on first use."""
    path = folder / f"{FORMS[form]}.gguf"
    if not path.exists():
        unfinished = path.with_suffix(".part")
        write(unfinished, folder, form)
        unfinished.rename(path)
    return path


def write(path: Path, folder: Path, form: str) -> None:
    """Write the weights of `folder`: matrices in a form, norms in float32. It holds no tokens but their number."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    kind = gguf.GGMLQuantizationType[FORMS[form]]
    for name, tensor in stored(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, head_dim)
        own = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(named(name), gguf.quants.quantize(tensor, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(name: str) -> str:
    """Return this format's name of a tensor that Hugging Face calls `name`."""
    parts = name.removesuffix(".weight").split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{_NAMES['.'.join(parts[3:])]}.weight"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
        ".".join(parts)
    ] + ".weight"


def interleaved(matrix: np.ndarray, head_dim: int) -> np.ndarray:
    """Return queries' or keys' weights with both channels of each rotated pair side by side, as llama.cpp turns them.

    Hugging Face pairs channel i of a head with channel i + head_dim / 2.
    """
    width = matrix.shape[1]
    return matrix.reshape(-1, 2, head_dim // 2, width).swapaxes(1, 2).reshape(-1, width)


def stored(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a safetensors file of bfloat16, as float32."""
    content = path.read_bytes()
    (size,) = struct.unpack_from("<Q", content)
    begin, found = 8 + size, {}
    for name, facts in json.loads(content[8:begin]).items():
        if name == "__metadata__":
            continue
        if facts["dtype"] != "BF16":
            raise ValueError(f"{name} of {path}: got {facts['dtype']}, wanted BF16")
        first, last = facts["data_offsets"]
        bits = np.frombuffer(content[begin + first : begin + last], np.uint16).astype(np.uint32) << 16
        found[name] = bits.view(np.float32).reshape(facts["shape"])
    return found

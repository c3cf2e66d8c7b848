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

# This format's names of settings and of tensors, and those of Hugging Face.
_FIELDS = {
    **{"vocab_size": "vocab_size", "context_length": "max_position_embeddings", "embedding_length": "hidden_size"},
    **{"feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers"},
    **{"head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads"},
    **{"layer_norm_rms_eps": "rms_norm_eps", "rope_dimension_count": "head_dim", "rope_freq_base": "rope_theta"},
}
_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_TENSORS = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
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
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    for field, name in _FIELDS.items():
        getattr(writer, f"add_{field}")(config[name])
    kind = gguf.GGMLQuantizationType[FORMS[form]]
    for name, tensor in stored(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, config["head_dim"])
        own = kind if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(named(name), gguf.quants.quantize(tensor, own), raw_dtype=own)
    for part in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{part}_to_file")()
    writer.close()


def named(name: str) -> str:
    """Return this format's name of a tensor that Hugging Face calls `name`."""
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{_LAYER_TENSORS[rest]}.weight"
    return f"{_TENSORS[name]}.weight"


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

"""A model in a GGUF file: its configuration with the keys of config.json, and the sources of its weights.

llama.cpp's converter renames tensors, permutes the rows of queries and keys of some architectures so that the two
channels of a rotated pair are adjacent, and adds 1 to the norms of Gemma; `read` undoes the last two.
Names and keys: llama.cpp, gguf-py/gguf/constants.py and convert_hf_to_gguf.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.errors import UsageError
from et_jax.io.gguf import FLOATS, Gguf, GgufTensor, read_gguf
from et_jax.io.json_files import named
from et_jax.models.config import ModelConfig
from et_jax.models.families.registry import FAMILIES, from_hugging_face
from et_jax.models.sources import Piece, Shape, Source, Sources, fused, one_to_one, tensor_shapes

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
QUANTISED = "quantised"
"""The stored type of a tensor that is not of a float type."""

_ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "granite": "granite",
    "olmo2": "olmo2",
}
"""The family of each architecture. Mixtral has the architecture llama, with experts."""

_SLIDING = ("gemma2", "gemma3", "phi3")
"""Architectures whose layers may have a sliding window."""

_NEIGHBOURS = ("llama", "mixtral", "smollm3", "granite")
"""Families whose rotated pairs of channels are adjacent in the rows of queries and keys."""

_TENSORS = {
    "embedding": EMBEDDING,
    "final_norm": "output_norm.weight",
    "head": HEAD,
    "layers.*.attention_norm": "blk.*.attn_norm.weight",
    "layers.*.q": "blk.*.attn_q.weight",
    "layers.*.k": "blk.*.attn_k.weight",
    "layers.*.v": "blk.*.attn_v.weight",
    "layers.*.o": "blk.*.attn_output.weight",
    "layers.*.q_bias": "blk.*.attn_q.bias",
    "layers.*.k_bias": "blk.*.attn_k.bias",
    "layers.*.v_bias": "blk.*.attn_v.bias",
    "layers.*.q_norm": "blk.*.attn_q_norm.weight",
    "layers.*.k_norm": "blk.*.attn_k_norm.weight",
    "layers.*.attention_out_norm": "blk.*.post_attention_norm.weight",
    "layers.*.ffn_norm": "blk.*.ffn_norm.weight",
    "layers.*.gate": "blk.*.ffn_gate.weight",
    "layers.*.up": "blk.*.ffn_up.weight",
    "layers.*.down": "blk.*.ffn_down.weight",
    "layers.*.ffn_out_norm": "blk.*.post_ffw_norm.weight",
    "layers.*.experts.router": "blk.*.ffn_gate_inp.weight",
    "layers.*.experts.gate": "blk.*.ffn_gate_exps.weight",
    "layers.*.experts.up": "blk.*.ffn_up_exps.weight",
    "layers.*.experts.down": "blk.*.ffn_down_exps.weight",
    "layers.*.experts.shared.router": "blk.*.ffn_gate_inp_shexp.weight",
    "layers.*.experts.shared.gate": "blk.*.ffn_gate_shexp.weight",
    "layers.*.experts.shared.up": "blk.*.ffn_up_shexp.weight",
    "layers.*.experts.shared.down": "blk.*.ffn_down_shexp.weight",
}
_FUSED = {"blk.*.attn_qkv.weight": ("q", "k", "v"), "blk.*.ffn_up.weight": ("gate", "up")}
"""The fused tensors of phi3, which concatenate matrices of a layer along their rows."""

_ROTATION = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_OF_QUERIES_OR_KEYS = re.compile(r"blk\.\d+\.attn_([qk])\.weight")


def read_config(file: Path) -> ModelConfig:
    """Return the configuration that a file describes. Raises UsageError for an architecture that is not supported."""
    return from_hugging_face(config_values(read_gguf(file)), str(file))


def config_values(gguf: Gguf) -> dict[str, Any]:
    """Return a file's metadata of its model, with the keys of config.json."""
    name = str(gguf.values.get("general.architecture"))
    if name not in _ARCHITECTURES:
        raise UsageError(
            f"{gguf.file}: architecture {named(name)} is not supported; use one of {', '.join(_ARCHITECTURES)}."
        )

    def given(key: str, default: Any = None) -> Any:
        return gguf.values.get(f"{name}.{key}", default)

    embedding = gguf.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UsageError(f"{gguf.file} lacks the matrix {EMBEDDING}; fetch the file again.")
    if given("attention.sliding_window") and name not in _SLIDING:
        raise UsageError(f"{gguf.file}: windows of {name} are not supported; use a model without.")
    mixture = bool(given("expert_count"))
    family = "mixtral" if name == "llama" and mixture else _ARCHITECTURES[name]
    heads = _each_layer(gguf, "head_count", given("attention.head_count"))
    head_dim = given("attention.key_length") or _share(given("embedding_length"), heads)
    if given("attention.value_length", head_dim) != head_dim:
        raise UsageError(f"{gguf.file}: keys and values of other lengths are not supported; use another model.")
    values = {
        "architectures": [FAMILIES[family].class_name],
        "vocab_size": embedding.shape[0],
        "hidden_size": given("embedding_length"),
        "intermediate_size": _each_layer(gguf, "feed_forward_length", given("feed_forward_length")),
        "num_hidden_layers": given("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _each_layer(gguf, "head_count_kv", given("attention.head_count_kv")),
        "head_dim": head_dim,
        "max_position_embeddings": given("context_length"),
        "rms_norm_eps": given("attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": given("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(gguf, given),
        "tie_word_embeddings": HEAD not in gguf.tensors,
        "bos_token_id": gguf.values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.values.get("tokenizer.ggml.eos_token_id"),
    }
    if mixture:
        values |= {"num_experts_per_tok": given("expert_used_count")} | _expert_values(gguf, family)
        values["norm_topk_prob"] = bool(given("expert_weights_norm", family != "qwen2_moe"))
    return values | _own_values(name, given, values)


def _own_values(name: str, given: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are specific to an architecture."""
    if name in ("gemma2", "gemma3"):
        largest = (name, values["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62))  # only the 27B models differ
        width = _share(values["hidden_size"], values["num_attention_heads"])
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": width if largest else values["head_dim"],
            "sliding_window": given("attention.sliding_window"),
            "attn_logit_softcapping": given("attn_logit_softcapping", 50.0 if name == "gemma2" else None),
            "final_logit_softcapping": given("final_logit_softcapping", 30.0 if name == "gemma2" else None),
            "rope_local_base_freq": given("rope.freq_base_swa", 10_000.0) if name == "gemma3" else None,
        }
    if name == "granite":
        return {
            "attention_multiplier": given("attention.scale"),
            "embedding_multiplier": given("embedding_scale"),
            "residual_multiplier": given("residual_scale"),
            "logits_scaling": given("logit_scale"),
        }
    if name == "phi3":
        turned, head_dim = given("rope.dimension_count", values["head_dim"]), values["head_dim"]
        known = isinstance(turned, int) and isinstance(head_dim, int) and head_dim > 0
        return {
            "sliding_window": given("attention.sliding_window") or None,
            "partial_rotary_factor": turned / head_dim if known else turned,  # a later check rejects other types
        }
    return {}


def _expert_values(gguf: Gguf, family: str) -> dict[str, Any]:
    """Return the sizes of experts from the shapes of their tensors, which all versions of the format share."""
    shapes = {name.split(".", 2)[2]: place.shape for name, place in gguf.tensors.items() if name.startswith("blk.")}
    gates, shared = shapes.get("ffn_gate_exps.weight", ()), shapes.get("ffn_gate_shexp.weight", ())
    if len(gates) != 3:
        raise UsageError(f"{gguf.file} has experts, but not as ffn_gate_exps; use a file of a newer converter.")
    if family == "mixtral":
        return {"num_local_experts": gates[0], "intermediate_size": gates[1]}
    own = {"num_experts": gates[0], "moe_intermediate_size": gates[1]}
    return own | ({"shared_expert_intermediate_size": shared[0]} if shared else {})


def _rope_scaling(gguf: Gguf, given: Any) -> dict[str, Any] | None:
    """Return the scaling of rotary frequencies. Factors per frequency are expressed as longrope."""
    kind, factor = given("rope.scaling.type", "none"), given("rope.scaling.factor")
    original = given("rope.scaling.original_context_length") or given("context_length")
    freqs, long, short = (gguf.tensors.get(name) for name in _ROTATION)
    if freqs is not None:
        same = freqs.numbers().tolist()
        scaling = {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        return scaling | {"original_max_position_embeddings": original}
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short.numbers().tolist(),
            "long_factor": long.numbers().tolist(),
            "attention_factor": given("rope.scaling.attn_factor"),
            "original_max_position_embeddings": original,
        }
    if kind == "none":
        return None
    values = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    of_yarn = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    if kind == "yarn":
        values |= {name: given(f"rope.scaling.yarn_{key}") for name, key in of_yarn.items()}
    return values


def _each_layer(gguf: Gguf, name: str, value: Any) -> Any:
    """Return a number that may be given once per layer. Raises UsageError if layers differ in it."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UsageError(f"{gguf.file}: layers of different {name} are not supported; use another model.")
    return value[0]


def _share(width: Any, heads: Any) -> int | None:
    """Return the width of a head, None if either is not a number, which the check of the configuration rejects."""
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def sources(config: ModelConfig, shapes: Mapping[str, Shape]) -> Sources:
    """Return where the leaves of a model lie in a GGUF file, given their shapes by name."""
    experts = {leaf: shape for leaf, shape in shapes.items() if re.search(r"experts\.(gate|up|down)$", leaf)}
    found = dict(one_to_one(_TENSORS)({leaf: shape for leaf, shape in shapes.items() if leaf not in experts}))
    if config.architecture == "phi3":
        found |= fused(_FUSED)(shapes)
    for leaf, shape in experts.items():  # expert by expert, so that at most a single expert is in memory twice
        tensor = _TENSORS[re.sub(r"\.\d+\.", ".*.", leaf)].replace("*", leaf.split(".")[1])
        rows = ((number, number + 1) for number in range(shape[0]))
        found[leaf] = Source(pieces=tuple(Piece(tensor=tensor, shape=shape, rows=one) for one in rows))
    return found


def check(file: Path, config: ModelConfig, sources: Sources) -> dict[str, GgufTensor]:
    """Return the tensors of a model.

    Raises UsageError if a tensor is absent, has another shape, or is not part of the model.
    """
    gguf, wanted = read_gguf(file), tensor_shapes(sources)
    for name, shape in wanted.items():
        place = gguf.tensors.get(name)
        if place is None:
            raise UsageError(f"{file} lacks the tensor {name}; fetch the file again.")
        if place.shape != shape and (1, *place.shape) != shape:
            raise UsageError(f"{place.file}: tensor {name} has shape {list(place.shape)}, wanted {list(shape)}.")
    for name, place in gguf.tensors.items():
        if name not in wanted and name not in _ROTATION:
            raise UsageError(f"{place.file}: tensor {named(name)} has no place in this {config.architecture} model.")
    return {name: gguf.tensors[name] for name in wanted}


def stored_as(place: GgufTensor) -> str:
    """Return the safetensors name of a tensor's dtype, or `QUANTISED`."""
    return place.kind if place.kind in FLOATS else QUANTISED


def embedding_stored_as(file: Path) -> str:
    """Return the stored type of a file's embedding, see `stored_as`."""
    return stored_as(read_gguf(file).tensors[EMBEDDING])


def read(place: GgufTensor, piece: Piece, config: ModelConfig) -> np.ndarray:
    """Return a piece of a weight as it was before llama.cpp's conversion."""
    found = place.numbers(piece.rows)
    found = found.reshape(piece.shape_read)
    queries_or_keys = _OF_QUERIES_OR_KEYS.fullmatch(place.name)
    if queries_or_keys and config.architecture in _NEIGHBOURS:
        heads = config.num_heads if queries_or_keys[1] == "q" else config.num_kv_heads
        return found.reshape(heads, config.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(found.shape)
    if config.norm_offset and place.name.endswith("norm.weight"):
        return found - np.asarray(config.norm_offset, found.dtype)
    return found

"""gpt-oss (OpenAI 2025): experts of a clamped activation in every layer, a logit of its own in each head's softmax.

Every second layer sees a window. Queries, keys, values, outputs, router and experts have biases. A file keeps the
matrices of all experts of a layer in one tensor, [expert, in, out], gate and up by turns; or as MXFP4.
"""

import re
from collections.abc import Mapping
from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import ClampedSwish, ExpertConfig, ModelConfig
from et_jax.models.families.base import TENSORS, Family, checked_experts, given, window_spelling
from et_jax.models.families.gemma2 import alternating
from et_jax.models.families.qwen2 import BIASES
from et_jax.models.sources import Piece, Shape, Source, Sources, one_to_one
from et_jax.types import replace

OWN = {
    "layers.*.o_bias": "model.layers.*.self_attn.o_proj.bias",
    "layers.*.sinks": "model.layers.*.self_attn.sinks",
    "layers.*.experts.router": "model.layers.*.mlp.router.weight",
    "layers.*.experts.router_bias": "model.layers.*.mlp.router.bias",
    "layers.*.experts.down_bias": "model.layers.*.mlp.experts.down_proj_bias",
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": 128,
    "rope_theta": 150_000.0,
}
"""What config.json leaves unsaid, as transformers has it; and `YARN`, where it says nothing of how positions turn."""


def values(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with what it leaves unsaid."""
    said = {name: value for name, value in values.items() if value is not None}
    rope = {} if said.get("rope_parameters") or said.get("rope_scaling") else {"rope_scaling": YARN}
    return values | DEFAULTS | rope | said


def meaning(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with what gpt-oss has."""
    experts = ExpertConfig(
        num_experts=given(file, "num_local_experts", "num_experts"),
        num_per_token=given(file, "num_experts_per_tok"),
        width=file.intermediate_size,
        normalised=True,
        layers=(True,) * config.num_layers,
        biases=True,
        activation=ClampedSwish(alpha=file.swiglu_alpha or 1.702, limit=file.swiglu_limit or 7.0),
    )
    biased = file.attention_bias is not False
    return replace(
        config,
        windows=alternating(file, 2),
        qkv_bias=biased,
        o_bias=biased,
        sinks=True,
        experts=checked_experts(experts),
    )


def spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values that `meaning` reads."""
    values: dict[str, Any] = window_spelling(config) | {"attention_bias": config.o_bias}
    if (e := config.experts) is None:
        return values
    values |= {"num_local_experts": e.num_experts, "num_experts_per_tok": e.num_per_token}
    if isinstance(e.activation, ClampedSwish):
        values |= {"swiglu_alpha": e.activation.alpha, "swiglu_limit": e.activation.limit}
    return values


def sources(shapes: Mapping[str, Shape]) -> Sources:
    """Return where the leaves lie: a tensor each, but for those of experts, of which gate and up are one tensor."""
    found, whole = {}, {}
    for leaf, shape in shapes.items():
        matched = re.fullmatch(r"layers\.(\d+)\.experts\.(gate|up|down)(_bias)?", leaf)
        if matched is None or leaf.endswith("down_bias"):
            whole[leaf] = shape
            continue
        layer, name, bias = matched.groups()
        tensor = f"model.layers.{layer}.mlp.experts.{'down' if name == 'down' else 'gate_up'}_proj{bias or ''}"
        lane = None if name == "down" else (("gate", "up").index(name), 2)
        experts, outputs, *inputs = shape
        stored = (experts, *inputs, outputs if lane is None else 2 * outputs)
        pieces = (  # expert by expert, so that no more than one is held twice while it is read
            Piece(tensor=tensor, shape=stored, rows=(number, number + 1), lane=lane, swapped=bias is None)
            for number in range(experts)
        )
        found[leaf] = Source(pieces=tuple(pieces))
    return found | dict(one_to_one(TENSORS | BIASES | OWN)(whole))


FAMILY = Family(
    name="gpt_oss",
    class_name="GptOssForCausalLM",
    meaning=meaning,
    spelling=spelling,
    sources=sources,
    values=values,
    attention_bias=True,
)

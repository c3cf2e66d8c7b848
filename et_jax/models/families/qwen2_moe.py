"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with experts, of which one is shared by all tokens."""

from et_jax.models.families.base import (
    EXPERTS,
    TENSORS,
    Family,
    expert_spelling,
    experts_from,
    switched_spelling,
    switched_windows,
)
from et_jax.models.families.qwen2 import BIASES
from et_jax.models.sources import one_to_one
from et_jax.types import replace

SHARED = {
    "layers.*.experts.shared.router": "model.layers.*.mlp.shared_expert_gate.weight",
    "layers.*.experts.shared.gate": "model.layers.*.mlp.shared_expert.gate_proj.weight",
    "layers.*.experts.shared.up": "model.layers.*.mlp.shared_expert.up_proj.weight",
    "layers.*.experts.shared.down": "model.layers.*.mlp.shared_expert.down_proj.weight",
}
FAMILY = Family(
    name="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    meaning=lambda file, config: replace(
        config,
        windows=switched_windows(file),
        qkv_bias=file.qkv_bias is not False,
        experts=experts_from(file, normalised=False, shared=True),
    ),
    spelling=lambda config: switched_spelling(config) | expert_spelling(config) | {"qkv_bias": config.qkv_bias},
    sources=one_to_one(TENSORS | BIASES | EXPERTS | SHARED),
)

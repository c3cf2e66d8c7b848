"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on queries, keys and values, and windows that are off unless asked for.

The biases are not said in config.json.
"""

from et_jax.models.families.base import TENSORS, Family, switched_spelling, switched_windows
from et_jax.models.sources import one_to_one
from et_jax.types import replace

BIASES = {
    "layers.*.q_bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.k_bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.v_bias": "model.layers.*.self_attn.v_proj.bias",
}
FAMILY = Family(
    name="qwen2",
    class_name="Qwen2ForCausalLM",
    meaning=lambda file, config: replace(config, windows=switched_windows(file), qkv_bias=True),
    spelling=switched_spelling,
    sources=one_to_one(TENSORS | BIASES),
)

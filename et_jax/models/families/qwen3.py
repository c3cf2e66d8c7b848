"""Qwen3 (Yang et al. 2025): a norm on each head's queries and keys, and windows that are off unless asked for.

The norms are not said in config.json.
"""

from et_jax.models.families.base import TENSORS, Family, switched_spelling, switched_windows
from et_jax.models.sources import one_to_one
from et_jax.types import replace

NORMS = {
    "layers.*.q_norm": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.k_norm": "model.layers.*.self_attn.k_norm.weight",
}
FAMILY = Family(
    name="qwen3",
    class_name="Qwen3ForCausalLM",
    meaning=lambda file, config: replace(config, windows=switched_windows(file), qk_norm=True),
    spelling=switched_spelling,
    sources=one_to_one(TENSORS | NORMS),
)

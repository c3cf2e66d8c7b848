"""OLMo 2 (OLMo Team 2024): norms after attention and feed-forward only, and over all queries and all keys together."""

from et_jax.models.families.base import TENSORS, Family
from et_jax.models.families.qwen3 import NORMS as QUERY_KEY_NORMS
from et_jax.models.sources import one_to_one
from et_jax.types import replace

NORMS = {
    "layers.*.attention_out_norm": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_out_norm": "model.layers.*.post_feedforward_layernorm.weight",
}
FAMILY = Family(
    name="olmo2",
    class_name="Olmo2ForCausalLM",
    meaning=lambda file, config: replace(config, norms="after", qk_norm=True, qk_norm_over="width"),
    spelling=lambda config: {},
    sources=one_to_one(TENSORS | QUERY_KEY_NORMS | NORMS),
)

"""Gemma 3 from 4B on: files of a model of text and images, of which the text model is read.

Their config.json keeps it as text_config, without what is as it was in the first of them.
"""

import re
from typing import Any

from et_jax.models.families import gemma3_text
from et_jax.models.families.base import TENSORS, Family
from et_jax.models.families.gemma2 import NORMS
from et_jax.models.families.qwen3 import NORMS as HEAD_NORMS
from et_jax.models.sources import one_to_one

DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 2,
}
"""What a text_config leaves unsaid, as transformers has it."""


def text_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says of the text model."""
    text = values.get("text_config")
    own = {name: value for name, value in text.items() if value is not None} if isinstance(text, dict) else {}
    return gemma3_text.flat(DEFAULTS | values | own)


FAMILY = Family(
    name="gemma3",
    class_name="Gemma3ForConditionalGeneration",
    meaning=gemma3_text.meaning,
    spelling=gemma3_text.spelling,  # which may stand beside text_config too
    sources=one_to_one({leaf: f"language_model.{name}" for leaf, name in (TENSORS | NORMS | HEAD_NORMS).items()}),
    head="language_model.lm_head.weight",
    values=text_values,
    apart=re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\."),
)

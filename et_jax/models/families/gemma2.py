"""Gemma 2 (Gemma Team 2024): every second layer sees a window, and scores and logits have soft caps.

Norms stand before and after both halves of a layer, and files hold their weights less 1; the embedding is scaled by
the square root of the width. config.json says none of that, nor that the embedding is the head.
"""

from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import ModelConfig
from et_jax.models.families.base import TENSORS, Family, Windows, tied_unless_said, window_spelling, windows_from
from et_jax.models.sources import one_to_one
from et_jax.types import replace

NORMS = {
    "layers.*.attention_out_norm": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.ffn_norm": "model.layers.*.pre_feedforward_layernorm.weight",
    "layers.*.ffn_out_norm": "model.layers.*.post_feedforward_layernorm.weight",
}


def alternating(file: ConfigFile, period: int) -> Windows:
    """Return the windows by layer_types; else of all layers but each `period`-th."""
    if file.layer_types:
        return windows_from(file, first=0)
    return tuple(file.sliding_window if (i + 1) % period else None for i in range(file.num_hidden_layers))


def gemma(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with what all Gemmas from the second on have."""
    return replace(
        config,
        activation=config.activation if file.hidden_activation else "gelu_tanh",
        norm_offset=1.0,
        norms="around",
        embedding_scale=config.hidden_size**0.5,
        score_scale=None if file.query_pre_attn_scalar is None else file.query_pre_attn_scalar**-0.5,
        score_cap=file.attn_logit_softcapping,
        logit_cap=file.final_logit_softcapping,
        tie_embeddings=tied_unless_said(file),
    )


def gemma_spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values that `gemma` and windows by layer read."""
    scale = config.score_scale
    return window_spelling(config) | {
        "query_pre_attn_scalar": None if scale is None else round(scale**-2, 6),
        "attn_logit_softcapping": config.score_cap,
        "final_logit_softcapping": config.logit_cap,
        "hidden_activation": "gelu_pytorch_tanh",
    }


FAMILY = Family(
    name="gemma2",
    class_name="Gemma2ForCausalLM",
    meaning=lambda file, config: replace(gemma(file, config), windows=alternating(file, 2)),
    spelling=gemma_spelling,
    sources=one_to_one(TENSORS | NORMS),
)

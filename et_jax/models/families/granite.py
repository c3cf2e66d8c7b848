"""Granite 3 (Granite Team 2024): scales on the embedding, the scores, what layers add, and the logits."""

from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import ModelConfig
from et_jax.models.families.base import TENSORS, Family
from et_jax.models.sources import one_to_one
from et_jax.types import replace


def meaning(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with its four scales, each 1 where it is unsaid."""
    return replace(
        config,
        score_scale=1.0 if file.attention_multiplier is None else file.attention_multiplier,
        embedding_scale=1.0 if file.embedding_multiplier is None else file.embedding_multiplier,
        residual_scale=1.0 if file.residual_multiplier is None else file.residual_multiplier,
        logit_divisor=1.0 if file.logits_scaling is None else file.logits_scaling,
    )


def spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values of the four scales."""
    return {
        "attention_multiplier": config.head_dim**-0.5 if config.score_scale is None else config.score_scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": config.logit_divisor,
    }


FAMILY = Family(
    name="granite",
    class_name="GraniteForCausalLM",
    meaning=meaning,
    spelling=spelling,
    sources=one_to_one(TENSORS),
)

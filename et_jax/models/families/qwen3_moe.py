"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts in the place of the feed-forward, in all layers or some."""

from et_jax.models.families.base import (
    EXPERTS,
    TENSORS,
    Family,
    expert_spelling,
    experts_from,
    switched_spelling,
    switched_windows,
)
from et_jax.models.families.qwen3 import NORMS
from et_jax.models.sources import one_to_one
from et_jax.types import replace

FAMILY = Family(
    name="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    meaning=lambda file, config: replace(
        config, windows=switched_windows(file), qk_norm=True, experts=experts_from(file, normalised=False)
    ),
    spelling=lambda config: switched_spelling(config) | expert_spelling(config),
    sources=one_to_one(TENSORS | NORMS | EXPERTS),
)

"""Gemma 3 (Gemma Team 2025), models of text alone: five layers with a window to each without, which turn differently.

Layers with a window have a rotary base of their own, and queries and keys are normalised by head. The rest is as in
Gemma 2, whose caps are gone.
"""

from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import FULL, SLIDING, ModelConfig
from et_jax.models.families.base import TENSORS, Family
from et_jax.models.families.gemma2 import NORMS, alternating, gemma, gemma_spelling
from et_jax.models.families.qwen3 import NORMS as HEAD_NORMS
from et_jax.models.sources import one_to_one
from et_jax.types import replace


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return config.json in its older spelling: one rotation, and beside it the base of layers with a window."""
    ropes = values.get("rope_parameters")
    if not isinstance(ropes, dict) or not isinstance(whole := ropes.get(FULL), dict):
        return dict(values)
    local = ropes.get(SLIDING)
    base = local.get("rope_theta") if isinstance(local, dict) else None
    return values | {"rope_parameters": whole, "rope_local_base_freq": base}


def meaning(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with what Gemma 3 has."""
    return replace(
        gemma(file, config),
        windows=alternating(file, file.sliding_window_pattern or 6),
        window_rope_theta=file.rope_local_base_freq or 10_000.0,
        qk_norm=True,
    )


def spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values that `meaning` reads."""
    return gemma_spelling(config) | {"rope_local_base_freq": config.window_rope_theta}


FAMILY = Family(
    name="gemma3_text",
    class_name="Gemma3ForCausalLM",
    base="Gemma3TextModel",
    meaning=meaning,
    spelling=spelling,
    sources=one_to_one(TENSORS | NORMS | HEAD_NORMS),
    values=flat,
)

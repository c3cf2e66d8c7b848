"""Phi-3 and Phi-4 (Abdin et al. 2024): fused projections, heads that turn in part, long rotary positions.

A file keeps queries, keys and values in one tensor, and gate and up in another.
"""

from collections.abc import Mapping
from typing import Any

from et_jax.models.config import ModelConfig
from et_jax.models.families.base import TENSORS, Family, windows_from
from et_jax.models.sources import Shape, Sources, fused, one_to_one
from et_jax.types import replace

FUSED = {
    "model.layers.*.self_attn.qkv_proj.weight": ("q", "k", "v"),
    "model.layers.*.mlp.gate_up_proj.weight": ("gate", "up"),
}


def sources(shapes: Mapping[str, Shape]) -> Sources:
    """Return where the leaves lie: rows of a fused tensor, or a tensor of their own."""
    return {**one_to_one(TENSORS)(shapes), **fused(FUSED)(shapes)}


def spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values of windows, of the part that turns and of the original length."""
    scaling = config.rope_scaling
    return {
        "sliding_window": next((window for window in config.windows if window is not None), None),
        "partial_rotary_factor": (config.rope_dim or config.head_dim) / config.head_dim,
    } | ({} if scaling is None else {"original_max_position_embeddings": scaling.original_max_positions})


FAMILY = Family(
    name="phi3",
    class_name="Phi3ForCausalLM",
    meaning=lambda file, config: replace(config, windows=windows_from(file, first=0)),
    spelling=spelling,
    sources=sources,
    partial_rotary=True,
)

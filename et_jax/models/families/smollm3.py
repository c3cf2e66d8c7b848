"""SmolLM3 (Bakouch et al. 2025): layers that turn nothing, by default each fourth, and else what all families share."""

from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import ModelConfig
from et_jax.models.families.base import TENSORS, Family, switched_spelling, switched_windows, tied_unless_said
from et_jax.models.sources import one_to_one
from et_jax.types import replace


def meaning(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    """Return the configuration with its layers that know no positions."""
    interval = file.no_rope_layer_interval or 4
    turned = file.no_rope_layers or [int((i + 1) % interval != 0) for i in range(config.num_layers)]
    return replace(
        config,
        windows=switched_windows(file),
        unrotated=tuple(i for i, turns in enumerate(turned) if not turns),
        tie_embeddings=tied_unless_said(file),
    )


def spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values that `meaning` reads; 0 stands for a layer that turns nothing."""
    turned = [int(i not in config.unrotated) for i in range(config.num_layers)]
    return switched_spelling(config) | {"no_rope_layers": turned}


FAMILY = Family(
    name="smollm3",
    class_name="SmolLM3ForCausalLM",
    meaning=meaning,
    spelling=spelling,
    sources=one_to_one(TENSORS),
)

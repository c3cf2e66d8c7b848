"""Mistral (Jiang et al. 2023): a sliding window, in every layer unless layer_types say otherwise."""

from et_jax.models.families.base import TENSORS, Family, windows_from
from et_jax.models.sources import one_to_one
from et_jax.types import replace

FAMILY = Family(
    name="mistral",
    class_name="MistralForCausalLM",
    meaning=lambda file, config: replace(config, windows=windows_from(file, first=0)),
    spelling=lambda config: {"sliding_window": next((window for window in config.windows if window is not None), None)},
    sources=one_to_one(TENSORS),
)

"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024): what all families share, and nothing else."""

from et_jax.models.families.base import TENSORS, Family
from et_jax.models.sources import one_to_one

FAMILY = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    meaning=lambda file, config: config,
    spelling=lambda config: {},
    sources=one_to_one(TENSORS),
)

"""Llama 2 and 3 (Touvron et al. 2023, Grattafiori et al. 2024): what all families share, and nothing else."""

from et_jax.models.families.base import TENSORS, Family

FAMILY = Family(
    name="llama",
    class_name="LlamaForCausalLM",
    tensors=TENSORS,
    meaning=lambda file, config: config,
    spelling=lambda config: {},
)

"""Mixtral (Jiang et al. 2024): Mistral with experts in every layer, weighed by their shares among the chosen ones."""

from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import ExpertConfig, ModelConfig
from et_jax.models.families import mistral
from et_jax.models.families.base import TENSORS, Family, checked_experts, given
from et_jax.models.sources import one_to_one
from et_jax.types import replace

EXPERTS = {
    "layers.*.experts.router": "model.layers.*.block_sparse_moe.gate.weight",
    "layers.*.experts.gate": "model.layers.*.block_sparse_moe.experts.*.w1.weight",
    "layers.*.experts.up": "model.layers.*.block_sparse_moe.experts.*.w3.weight",
    "layers.*.experts.down": "model.layers.*.block_sparse_moe.experts.*.w2.weight",
}


def _meaning(file: ConfigFile, config: ModelConfig) -> ModelConfig:
    experts = ExpertConfig(
        num_experts=given(file, "num_local_experts"),
        num_per_token=given(file, "num_experts_per_tok"),
        width=file.intermediate_size,
        normalised=True,
        layers=(True,) * config.num_layers,
    )
    return replace(mistral.FAMILY.meaning(file, config), experts=checked_experts(experts))


def _spelling(config: ModelConfig) -> dict[str, Any]:
    e = config.experts
    own = {} if e is None else {"num_local_experts": e.num_experts, "num_experts_per_tok": e.num_per_token}
    return mistral.FAMILY.spelling(config) | own


FAMILY = Family(
    name="mixtral",
    class_name="MixtralForCausalLM",
    meaning=_meaning,
    spelling=_spelling,
    sources=one_to_one(TENSORS | EXPERTS),
)

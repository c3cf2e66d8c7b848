"""A readable description of a loaded model: its device, kernels, cache and memory."""

from collections.abc import Sequence

import jax

from et_jax.decode.backends import serving_backend
from et_jax.decode.cache.eight_bits import dtype_name
from et_jax.decode.config import DecoderConfig
from et_jax.models.model import ModelWeights, dtype_of
from et_jax.models.weights import num_bytes
from et_jax.serve.config import LENGTHS, EngineConfig
from et_jax.serve.loading import min_context
from et_jax.serve.memory.preflight import Plan


def description(
    settings: EngineConfig, config: DecoderConfig, weights: ModelWeights, plan: Plan | None, remarks: Sequence[str] = ()
) -> list[str]:
    """Return the lines that describe a model under its own controller, with the table of its memory plan.

    `remarks` come from loading.
    """
    model = config.model
    stored = f"{num_bytes(weights) / 1e6:.1f} MB {config.quantize or dtype_of(weights)}"
    refusals = serving_backend(model, config.page_size, config.weights_dtype, config.cache_dtype)[1]
    return [
        f"model {settings.name}: {model.architecture}, {model.num_layers} layers, {stored}",
        *remarks,
        f"device {jax.devices()[0].device_kind}, attention backend {config.backend}",
        *(f"not chosen: {refusal}" for refusal in refusals),
        *_scoring(config),
        f"cache {config.num_pages} pages of {config.page_size} tokens in {dtype_name(config.cache_dtype)}, "
        f"{config.num_slots} slots of {config.max_length} tokens, {config.batch} served in a step"
        + ("" if settings.replicas == 1 else f", {settings.replicas} times over"),
        *_drafting(settings, config),
        *_experts(config),
        *([] if plan is None else plan.table()),
        f"compile cache in {jax.config.jax_compilation_cache_dir or 'memory only'}",
    ]


def _drafting(settings: EngineConfig, config: DecoderConfig) -> list[str]:
    """Return the line on drafting or a second model."""
    if config.controller.switch is not None:
        return [f"alternates with {settings.small}, by the entropy of the active model's prediction"]
    if settings.draft is None:
        return []
    most, length = settings.most_drafted, settings.draft_length or LENGTHS[0]
    return [f"up to {most} tokens drafted by {settings.draft}, {length} length"]


def _experts(config: DecoderConfig) -> list[str]:
    """Return the line on the number of experts, and how many a token uses."""
    found, rule = config.model.experts, config.controller.experts
    if found is None:
        return []
    by_rule = "" if rule is None else f" at most, by {rule}"
    layers = f"{sum(found.layers)} of {config.model.num_layers} layers"
    return [f"experts {found.num_experts} in {layers}, of which a token goes to {found.num_per_token}{by_rule}"]


def _scoring(config: DecoderConfig) -> list[str]:
    """Return the lines on block scoring, if any layer selects blocks."""
    if all(selector.reads_all for selector in config.selectors):
        return []
    backend, refusals = config.scoring
    least = config.controller.min_context
    chosen = []
    if least is not None:
        chosen = [f"blocks are selected {min_context.described(least)}; min_context 0 selects always"]
    return [
        f"blocks scored by {backend}",
        *(f"not chosen: {refusal}" for refusal in refusals),
        *config.left_to_xla,
        *chosen,
    ]

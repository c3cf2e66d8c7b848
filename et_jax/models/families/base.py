"""What a family of models has to say, and what several of them say alike."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import FULL, SLIDING, ExpertConfig, ModelConfig
from et_jax.models.sources import Shape, Sources

Windows = tuple[int | None, ...]
"""Each layer's sliding window in tokens, None where the layer sees everything."""

TENSORS = {
    "embedding": "model.embed_tokens.weight",
    "layers.*.attention_norm": "model.layers.*.input_layernorm.weight",
    "layers.*.q": "model.layers.*.self_attn.q_proj.weight",
    "layers.*.k": "model.layers.*.self_attn.k_proj.weight",
    "layers.*.v": "model.layers.*.self_attn.v_proj.weight",
    "layers.*.o": "model.layers.*.self_attn.o_proj.weight",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.gate": "model.layers.*.mlp.gate_proj.weight",
    "layers.*.up": "model.layers.*.mlp.up_proj.weight",
    "layers.*.down": "model.layers.*.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
"""The usual names of the tensors that hold a model's weights; `*` stands for the number of a layer."""

MAX_EXPERTS = 2**17  # over all layers, each of which is named by itself in files: published models have up to 24,000

EXPERTS = {
    "layers.*.experts.router": "model.layers.*.mlp.gate.weight",
    "layers.*.experts.gate": "model.layers.*.mlp.experts.*.gate_proj.weight",
    "layers.*.experts.up": "model.layers.*.mlp.experts.*.up_proj.weight",
    "layers.*.experts.down": "model.layers.*.mlp.experts.*.down_proj.weight",
}
"""Those of a mixture of experts; the second `*` stands for the number of an expert."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, as their files are written.

    `name` is the `architecture` of its configurations and the model_type of config.json, `class_name` what
    architectures holds there, and `base_name` what it holds where a model was saved without its head. `meaning` adds to
    a configuration of what all families share what config.json says of this one's own, and raises ValueError where that
    cannot be; `spelling` returns the config.json values of that.
    `sources` says where the leaves of a model lie, given their shapes by name; `head` is the tensor of the output
    matrix, under whose name a model without one of its own may keep its embedding. `values` turns config.json into the
    words that `ConfigFile` knows, where it says things in its own way. `partial_rotary` says whether a part of a head
    only may be turned, `attention_bias` whether config.json may ask for biases of attention, which `meaning` reads, and
    `apart` matches the tensors of what the family's files hold beside the text model.
    """

    name: str
    class_name: str
    meaning: Callable[[ConfigFile, ModelConfig], ModelConfig]
    spelling: Callable[[ModelConfig], dict[str, Any]]
    sources: Callable[[Mapping[str, Shape]], Sources]
    head: str = TENSORS["head"]
    values: Callable[[dict[str, Any]], dict[str, Any]] = dict
    base: str | None = None
    partial_rotary: bool = False
    attention_bias: bool = False
    apart: re.Pattern[str] | None = None

    @property
    def base_name(self) -> str:
        """The class of the model without a head, by default the one that transformers names after `class_name`."""
        return self.base or re.sub("ForCausalLM$|ForConditionalGeneration$", "Model", self.class_name)


def tied_unless_said(file: ConfigFile) -> bool:
    """Return whether the embedding is the head in a family that says so in config.json only where it is not."""
    return file.tie_word_embeddings is not False


def window_spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values of windows by layer."""
    window = next((window for window in config.windows if window is not None), None)
    return {"sliding_window": window, "layer_types": [FULL if one is None else SLIDING for one in config.windows]}


def windows_from(file: ConfigFile, first: int) -> Windows:
    """Return the window of each layer: by layer_types where they are given, else of all from layer `first` on.

    Raises ValueError for a window of 0.
    """
    window, layers = file.sliding_window, range(file.num_hidden_layers)
    if window == 0:  # as written where no layer slides
        raise ValueError("the field sliding_window is 0, and layers slide")
    slide = [kind == SLIDING for kind in file.layer_types] if file.layer_types else [i >= first for i in layers]
    return tuple(window if slides else None for slides in slide)


def switched_windows(file: ConfigFile) -> Windows:
    """Return the windows of a family whose files carry one that is off unless `use_sliding_window` says so."""
    if not file.use_sliding_window:
        return (None,) * file.num_hidden_layers
    return windows_from(file, first=28 if file.max_window_layers is None else file.max_window_layers)


def experts_from(file: ConfigFile, *, normalised: bool, shared: bool = False) -> ExpertConfig:
    """Return the mixture of a family in which some layers are none: one in so many, but for those that are named.

    Where config.json does not say it, probabilities are `normalised` or not as the family has it.
    Raises ValueError for what cannot be, or is absent.
    """
    step, layers, dense = file.decoder_sparse_step, range(1, file.num_hidden_layers + 1), file.mlp_only_layers or []
    step = 1 if step is None else step
    return checked_experts(
        ExpertConfig(
            num_experts=given(file, "num_experts", "num_local_experts"),
            num_per_token=given(file, "num_experts_per_tok"),
            width=given(file, "moe_intermediate_size"),
            normalised=normalised if file.norm_topk_prob is None else file.norm_topk_prob,
            layers=tuple(step > 0 and i % step == 0 and i - 1 not in dense for i in layers),
            shared_width=given(file, "shared_expert_intermediate_size") if shared else None,
        )
    )


def checked_experts(experts: ExpertConfig) -> ExpertConfig:
    """Return a mixture. Raises ValueError where a token would go to more experts than there are, or these are many."""
    if experts.num_per_token > experts.num_experts:
        raise ValueError(f"num_experts_per_tok is {experts.num_per_token} of {experts.num_experts} experts")
    if (number := sum(experts.layers) * experts.num_experts) > MAX_EXPERTS:
        raise ValueError(f"there are {number} experts over all layers, more than {MAX_EXPERTS}")
    return experts


def given(file: ConfigFile, *names: str) -> int:
    """Return the number of config.json under the first of these names that it has. Raises ValueError for none."""
    for name in names:
        if (number := getattr(file, name)) is not None:
            return number
    raise ValueError(f"the field {names[0]} is missing")


def expert_spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values that `experts_from` reads."""
    e = config.experts
    if e is None:
        return {}
    values = {
        "num_experts": e.num_experts,
        "num_experts_per_tok": e.num_per_token,
        "moe_intermediate_size": e.width,
        "norm_topk_prob": e.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, mixes in enumerate(e.layers) if not mixes],
    }
    return values if e.shared_width is None else values | {"shared_expert_intermediate_size": e.shared_width}


def switched_spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values that `switched_windows` reads."""
    window = next((window for window in config.windows if window is not None), None)
    if window is None:
        return {}
    kinds = [FULL if window is None else SLIDING for window in config.windows]
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": kinds.index(SLIDING),
        "layer_types": kinds,
    }

"""What a family of models has to say, and what several of them say alike."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from et_jax.io.schema import ConfigFile
from et_jax.models.config import FULL, SLIDING, ModelConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models, as their files are written.

    `name` is the `architecture` of its configurations and the model_type of config.json, `class_name` what
    architectures holds there. `meaning` adds to a configuration of what all families share what config.json says of
    this one's own, `spelling` returns the config.json values of that. `sources` says where the leaves of a model lie,
    given their shapes by name; `head` is the tensor of the output matrix, under whose name a model without one of its
    own may keep its embedding. `values` turns config.json into the words that `ConfigFile` knows, where it says things
    in its own way. `partial_rotary` says whether a part of a head only may be turned, and `apart` matches the tensors
    of what the family's files hold beside the text model.
    """

    name: str
    class_name: str
    meaning: Callable[[ConfigFile, ModelConfig], ModelConfig]
    spelling: Callable[[ModelConfig], dict[str, Any]]
    sources: Callable[[Mapping[str, Shape]], Sources]
    head: str = TENSORS["head"]
    values: Callable[[dict[str, Any]], dict[str, Any]] = dict
    partial_rotary: bool = False
    apart: re.Pattern[str] | None = None


def tied_unless_said(file: ConfigFile) -> bool:
    """Return whether the embedding is the head in a family that says so in config.json only where it is not."""
    return file.tie_word_embeddings is not False


def window_spelling(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json values of windows by layer."""
    window = next((window for window in config.windows if window is not None), None)
    return {"sliding_window": window, "layer_types": [FULL if one is None else SLIDING for one in config.windows]}


def windows_from(file: ConfigFile, first: int) -> Windows:
    """Return the window of each layer: by layer_types where they are given, else of all from layer `first` on."""
    window, layers = file.sliding_window, range(file.num_hidden_layers)
    slide = [kind == SLIDING for kind in file.layer_types] if file.layer_types else [i >= first for i in layers]
    return tuple(window if slides else None for slides in slide)


def switched_windows(file: ConfigFile) -> Windows:
    """Return the windows of a family whose files carry one that is off unless `use_sliding_window` says so."""
    if not file.use_sliding_window:
        return (None,) * file.num_hidden_layers
    return windows_from(file, first=28 if file.max_window_layers is None else file.max_window_layers)


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

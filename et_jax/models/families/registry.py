"""The families there are, found by name, and config.json read and written by the family that it names."""

import re
from collections.abc import Mapping
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.json_files import FETCH, checked, named
from et_jax.io.schema import ConfigFile, KindFile
from et_jax.models.config import ModelConfig
from et_jax.models.config_file import shared_config, shared_values
from et_jax.models.families import (
    gemma2,
    gemma3,
    gemma3_text,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)
from et_jax.models.families.base import Family

_MIXTURES = (mixtral, qwen2_moe, qwen3_moe, gpt_oss)
_MODULES = (llama, mistral, qwen2, qwen3, gemma2, gemma3_text, gemma3, phi3, olmo2, smollm3, granite, *_MIXTURES)
FAMILIES = {one.FAMILY.name: one.FAMILY for one in _MODULES}
BEYOND = {
    r"Qwen3Next|Qwen3_5|Jamba|Zamba|Bamba|FalconH1|Mamba|GraniteMoeHybrid|Lfm2|Nemotron": (
        "has layers of linear attention or of state spaces, whose state this cache of keys and values has no place for"
    ),
    r"Gemma3n|Gemma4": "has layers that share one cache, where here each layer has a cache of its own",
    r"Deepseek|Kimi": "compresses keys and values into a latent, where here the cache holds them whole",
    r"ForConditionalGeneration$": "is of more than text, where here text alone is read",
}
"""What architectures, by their names, have that is beyond this cache."""


def family_of(config: ModelConfig) -> Family:
    """Return the family of a configuration. Raises ValueError for an architecture that is none."""
    if config.architecture not in FAMILIES:
        raise ValueError(f"architecture is {config.architecture!r}; it must be one of {', '.join(FAMILIES)}.")
    return FAMILIES[config.architecture]


def from_hugging_face(values: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Return the configuration that `values`, a parsed `config.json`, describes.

    Raises UsageError for an architecture or a feature outside the supported families, and for a field
    that cannot be, before any weight is touched; `source` is the file named in the message.
    """
    kind = checked(dict(values), KindFile, source)
    name = (kind.architectures or [kind.model_type or "none given"])[0]
    by_class = {name: one for one in FAMILIES.values() for name in (one.class_name, one.base_name)}
    family = by_class.get(name)
    if family is None:
        supported = ", ".join(sorted(one.class_name for one in FAMILIES.values()))
        for pattern, reason in BEYOND.items():
            if re.search(pattern, name):
                raise UsageError(f"{source}: architecture {named(name)} {reason}; use one of {supported}.")
        raise UsageError(f"{source}: architecture {named(name)} is not supported; use one of {supported}.")
    file = checked(family.values(dict(values)), ConfigFile, source)
    parts = {"partial_rotary": family.partial_rotary, "attention_bias": family.attention_bias}
    shared = shared_config(file, family.name, source, **parts)
    try:
        return family.meaning(file, shared)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{source}: {error}; {FETCH}.") from error


def config_to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` values that describe `config`.

    Raises ValueError where the family has no spelling for the configuration, such as windows where it has none.
    """
    family = family_of(config)
    kind = {"architectures": [family.class_name], "model_type": family.name}
    values = kind | shared_values(config) | family.spelling(config)
    if from_hugging_face(values) != config:
        raise ValueError(
            f"a {family.name} config.json cannot describe {config}; choose an architecture that has its parts."
        )
    return values

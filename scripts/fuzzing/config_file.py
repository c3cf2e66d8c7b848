"""config.json: any field of any type, beside weights of small models of several families, in 8 and 4 bits too."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import jax

from et_jax.errors import UsageError
from scripts.fuzzing import edits
from scripts.fuzzing.small_folder import EXPERTS, GPT_OSS, LENGTH, LLAMA, open_model, overlay, write_model
from scripts.fuzzing.watch import ACCEPTED, COMPILING, SECONDS, Fault

# Fields that a file may have and those of the small models lack.
_NEUTRAL: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
}
_NEUTRAL |= {"partial_rotary_factor": 1.0, "quantization_config": None}
_NEUTRAL |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
_LENGTH = {"original_max_position_embeddings": 64}
_SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | _LENGTH
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1} | _LENGTH
_GEMMA2 = {"norm_offset": 1.0, "norms": "around", "activation": "gelu_tanh", "score_cap": 5.0, "logit_cap": 8.0}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"windows": (32, 32)},
    "qwen3": {"windows": (None, 32), "qk_norm": True},
    "gemma2": {"windows": (32, None), "embedding_scale": LLAMA.hidden_size**0.5, **_GEMMA2},
    "mixtral": {"experts": EXPERTS},
}
# The model, the fields that are changed in its config.json first, and the settings with which it is opened.
_BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in (*_MODELS, "gpt_oss", "mxfp4")},
    "more": ("llama", _NEUTRAL, {}),
    "scaled": ("llama", {"rope_scaling": _SCALED}, {}),
    "yarn": ("llama", {"rope_scaling": _YARN, "eos_token_id": [0, 1]}, {}),
    "int8": ("llama", {}, {"quantize": "int8"}),
    "mxfp4 as int8": ("mxfp4", {}, {"quantize": "int8"}),
}


def draw(random: Random) -> dict[str, Any]:
    """Return a case; one in ten decodes a few tokens if the file is accepted, which compiles."""
    decodes = random.random() < 0.1
    base, changes = random.choice(list(_BASES)), edits.changes(random)
    return {"base": base, "changes": changes, "decodes": decodes, "seconds": COMPILING if decodes else SECONDS}


def prepare(folder: Path) -> Callable[..., str]:
    """Write the models, and return the function that runs a case."""
    configs = {name: dataclasses.replace(LLAMA, architecture=name, **fields) for name, fields in _MODELS.items()}
    models = {name: write_model(folder / name, config) for name, config in (configs | {"gpt_oss": GPT_OSS}).items()}
    models["mxfp4"] = write_model(folder / "mxfp4", GPT_OSS, packed=True)

    def run(base: str, changes: Any, decodes: bool) -> str:
        name, first, settings = _BASES[base]
        values = json.loads((models[name] / "config.json").read_text()) | first
        config = edits.mutated(json.dumps(values, indent=2).encode(), changes)
        changed = overlay(folder / "changed", models[name], {"config.json": config})
        longest = LENGTH // 2 if decodes else None
        model = open_model(changed, max_model_len=longest, max_num_seqs=2, **settings)
        model.describe()
        if decodes:
            [completion] = model.generate("Once upon a time", max_tokens=3)
            jax.clear_caches()  # a process has room for some thousand programs
            if completion.error is not None:
                raise UsageError(completion.error)
            if len(completion.token_ids) > 3:
                raise Fault("silent", f"{len(completion.token_ids)} tokens came where 3 were asked for")
        return ACCEPTED

    return run

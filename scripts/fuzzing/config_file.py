"""config.json: any field of any type, beside weights of small models of several families, in 8 and 4 bits too."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from fuzzing.cases import ACCEPTED, COMPILING, SECONDS, Fault, Surface
from fuzzing.edits import MUTATIONS, Mutation, mutated
from fuzzing.small_folder import GPT_OSS, LENGTH, LLAMA, open_model, overlay, write_model
from hypothesis import strategies as st

from et_jax.errors import UsageError
from et_jax.models.config import ExpertConfig

# Fields that a file may hold and the small models' need not.
_NEUTRAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
_SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64}
_MODELS = {
    "llama": LLAMA,
    "mistral": dataclasses.replace(LLAMA, architecture="mistral", windows=(32, 32)),
    "qwen3": dataclasses.replace(LLAMA, architecture="qwen3", windows=(None, 32), qk_norm=True),
    "gemma2": dataclasses.replace(
        LLAMA,
        architecture="gemma2",
        windows=(32, None),
        norm_offset=1.0,
        norms="around",
        activation="gelu_tanh",
        score_cap=5.0,
        logit_cap=8.0,
        embedding_scale=LLAMA.hidden_size**0.5,
    ),
    "mixtral": dataclasses.replace(
        LLAMA,
        architecture="mixtral",
        experts=ExpertConfig(
            num_experts=4, num_per_token=2, width=LLAMA.intermediate_size, normalised=True, layers=(True, True)
        ),
    ),
    "gpt_oss": GPT_OSS,
}
_BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "more": ("llama", _NEUTRAL, {}),
    "scaled": ("llama", {"rope_scaling": _SCALED}, {}),
    "yarn": ("llama", {"rope_scaling": _YARN, "eos_token_id": [0, 1]}, {}),
    "int8": ("llama", {}, {"quantize": "int8"}),
    "mistral": ("mistral", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "gemma2": ("gemma2", {}, {}),
    "mixtral": ("mixtral", {}, {}),
    "gpt_oss": ("gpt_oss", {}, {}),
    "mxfp4": ("mxfp4", {}, {}),
    "mxfp4 as int8": ("mxfp4", {}, {"quantize": "int8"}),
}
"""A model, the fields that are changed in its config.json first, and the settings with which it is opened."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A file to begin with, what is done to it, and whether a few tokens are decoded if it is accepted."""

    base: str
    mutation: Mutation
    decodes: bool


def prepare(folder: Path) -> Callable[[Case], str]:
    """Write the models, and return what runs a case."""
    models = {name: write_model(folder / name, config) for name, config in _MODELS.items()}
    models["mxfp4"] = write_model(folder / "mxfp4", GPT_OSS, packed=True)

    def run(case: Case) -> str:
        name, changes, settings = _BASES[case.base]
        values = json.loads((models[name] / "config.json").read_text()) | changes
        config = mutated(json.dumps(values, indent=2).encode(), case.mutation)
        changed = overlay(folder / "changed", models[name], {"config.json": config})
        longest = LENGTH // 2 if case.decodes else None
        model = open_model(changed, max_model_len=longest, max_num_seqs=2, **settings)
        model.describe()
        if case.decodes:
            [completion] = model.generate("Once upon a time", max_tokens=3)
            jax.clear_caches()  # a process has room for some thousand programs
            if completion.error is not None:
                raise UsageError(completion.error)
            if len(completion.token_ids) > 3:
                raise Fault("silent", f"{len(completion.token_ids)} tokens came where 3 were asked for")
        return ACCEPTED

    return run


SURFACE = Surface(
    cases=st.builds(
        Case,
        base=st.sampled_from(tuple(_BASES)),
        mutation=MUTATIONS,
        decodes=st.sampled_from((True, *(False,) * 9)),
    ),
    prepare=prepare,
    seconds=lambda case: COMPILING if case.decodes else SECONDS,
)

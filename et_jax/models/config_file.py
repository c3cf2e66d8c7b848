"""Hugging Face's `config.json`, read and written: what the files of all families share."""

import dataclasses
from typing import Any, Literal

from et_jax.errors import UsageError
from et_jax.io.json_files import FETCH, checked, named
from et_jax.io.schema import ConfigFile, RopeFile
from et_jax.models.config import LAYER_TYPES, ModelConfig, RopeScaling
from et_jax.models.encodings import encoding_of

ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def shared_config(
    file: ConfigFile, architecture: str, source: str, *, partial_rotary: bool = False, attention_bias: bool = False
) -> ModelConfig:
    """Return the configuration that `file` describes by what all families share: no windows, biases or head norms.

    `partial_rotary` says whether the family may turn a part of a head only, `attention_bias` whether it may have those.
    Raises UsageError for what no family here has; `source` is the file named in the message.
    """
    act = file.hidden_activation or file.hidden_act
    if act not in ACTIVATIONS:
        raise UsageError(f"{source}: hidden_act {named(act)} is not supported; only {' and '.join(ACTIVATIONS)} are.")
    for bias in ("attention_bias", "mlp_bias"):
        if getattr(file, bias) and not (attention_bias and bias == "attention_bias"):
            raise UsageError(f"{source}: {bias} is not supported; use a model without it.")
    if file.use_bidirectional_attention:
        raise UsageError(f"{source}: use_bidirectional_attention is not supported; use a model that writes text.")
    encoding_of(file.quantization_config, source)

    heads, layers, eos = file.num_attention_heads, file.num_hidden_layers, file.eos_token_id
    kv_heads = file.num_key_value_heads or heads
    if heads % kv_heads:
        raise UsageError(f"{source}: {heads} query heads cannot share {kv_heads} KV heads; the file is damaged.")
    if file.head_dim is None and file.hidden_size % (2 * heads):
        raise UsageError(
            f"{source}: hidden_size {file.hidden_size} does not make {heads} heads of one even size; give head_dim."
        )
    head_dim = file.head_dim or file.hidden_size // heads
    rope, rope_dim = _rope(file, head_dim, source, partial_rotary)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=file.max_position_embeddings,
        norm_eps=file.rms_norm_eps,
        rope_theta=10000.0 if rope.rope_theta is None else rope.rope_theta,
        rope_scaling=_rope_scaling(rope, file, rope_dim or head_dim, source),
        rope_dim=rope_dim,
        activation=ACTIVATIONS[act],
        windows=(None,) * layers,
        tie_embeddings=bool(file.tie_word_embeddings),
        bos_token_id=file.bos_token_id,
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )
    _check_layer_types(file, source)
    return config


def shared_values(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` values that all families share, in the spelling that old readers know too."""
    c = config
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": next(name for name, activation in ACTIVATIONS.items() if activation == c.activation),
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": None if c.rope_scaling is None else _scaling_to_hugging_face(c.rope_scaling),
        "tie_word_embeddings": c.tie_embeddings,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_ids[0] if len(c.eos_token_ids) == 1 else list(c.eos_token_ids) or None,
    }


def _scaling_to_hugging_face(scaling: RopeScaling) -> dict[str, Any]:
    fields = dataclasses.asdict(scaling)
    used = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        "longrope": ("factor", "attention_factor"),
    }[scaling.kind]
    given = {name: fields[name] for name in used if fields[name] is not None}
    if scaling.kind == "longrope":
        given |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    original = {"original_max_position_embeddings": scaling.original_max_positions}
    return {"rope_type": scaling.kind, "type": scaling.kind} | given | original


def _rope(file: ConfigFile, head_dim: int, source: str, partial_rotary: bool) -> tuple[RopeFile, int | None]:
    """Rotary settings from either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`.

    With them how many channels of a head are turned, None for all.
    """
    base = {} if file.rope_theta is None else {"rope_theta": file.rope_theta}
    given = base | (file.rope_scaling or {}) | (file.rope_parameters or {})
    for name in ("mscale", "mscale_all_dim"):
        if name in given:
            raise UsageError(f"{source}: the rotary setting {name} is not supported; use a model without it.")
    if LAYER_TYPES & given.keys():
        raise UsageError(
            f"{source}: rope_parameters for each kind of layer are not supported; use a model of one rotation."
        )
    rope = checked(given, RopeFile, f"{source}: rotary settings")
    parts = {file.partial_rotary_factor, rope.partial_rotary_factor} - {None, 1.0}
    if not parts:
        return rope, None
    if not partial_rotary:
        raise UsageError(f"{source}: partial_rotary_factor is not supported; use a model that rotates whole heads.")
    dim = int(head_dim * min(part for part in parts if part is not None))
    if len(parts) > 1 or not 0 < dim < head_dim or dim % 2:
        raise UsageError(f"{source}: partial_rotary_factor gives no even part of {head_dim} channels; {FETCH}.")
    return rope, dim


def _rope_scaling(rope: RopeFile, file: ConfigFile, dim: int, source: str) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn", "longrope"):
        known = "default, linear, llama3, yarn or longrope"
        raise UsageError(f"{source}: rope_type {named(kind)} is not supported; use {known}.")
    original = rope.original_max_position_embeddings or file.original_max_position_embeddings
    if kind == "longrope":
        return _long_rope(rope, file, dim, original, source)
    if rope.factor is None:
        raise UsageError(f"{source}: rope_type {kind} needs a factor; add one to the rotary settings.")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate")
    given = {name: getattr(rope, name) for name in optional if getattr(rope, name) is not None}
    original = original or file.max_position_embeddings
    scaling = RopeScaling(kind=kind, factor=rope.factor, original_max_positions=original, **given)
    if kind == "llama3" and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise UsageError(f"{source}: high_freq_factor must be above low_freq_factor; {FETCH}.")
    if kind == "yarn" and not scaling.beta_slow < scaling.beta_fast:
        raise UsageError(f"{source}: beta_fast must be above beta_slow; {FETCH}.")
    return scaling


def _long_rope(rope: RopeFile, file: ConfigFile, dim: int, original: int | None, source: str) -> RopeScaling:
    short, long = tuple(rope.short_factor or ()), tuple(rope.long_factor or ())
    if len(short) != dim // 2 or len(long) != dim // 2:
        raise UsageError(f"{source}: rope_type longrope needs {dim // 2} of short_factor and of long_factor; {FETCH}.")
    if original is None:
        raise UsageError(f"{source}: rope_type longrope needs original_max_position_embeddings; {FETCH}.")
    return RopeScaling(
        kind="longrope",
        factor=rope.factor or max(file.max_position_embeddings / original, 1.0),
        original_max_positions=original,
        attention_factor=rope.attention_factor,
        short_factors=short,
        long_factors=long,
    )


def _check_layer_types(file: ConfigFile, source: str) -> None:
    """Raise UsageError where the kinds of layers, if they are given, are unknown ones or too few."""
    if file.no_rope_layers and len(file.no_rope_layers) != file.num_hidden_layers:
        given = len(file.no_rope_layers)
        raise UsageError(f"{source}: no_rope_layers are {given} and the layers {file.num_hidden_layers}; {FETCH}.")
    if not (kinds := file.layer_types):
        return
    if strange := sorted(set(kinds) - LAYER_TYPES):
        raise UsageError(f"{source}: layer_types holds {named(strange[0])}, which is not supported; use another model.")
    if len(kinds) != file.num_hidden_layers:
        raise UsageError(f"{source}: layer_types are {len(kinds)} and the layers {file.num_hidden_layers}; {FETCH}.")

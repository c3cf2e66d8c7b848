"""What the decoder must know of a model, and what a Hugging Face `config.json` says of one, whatever its family."""

import dataclasses
from typing import Any, Literal

from et_jax.errors import UsageError
from et_jax.io.schema import FETCH, ConfigFile, RopeFile, checked, named
from et_jax.softmax import Softmax

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = {FULL, SLIDING}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones only, blending between
    the two corner wavelengths (Llama 3.1); `yarn` blends by rotation count and scales the rotation
    (Peng et al. 2023, section 3).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The mixture of experts that stands in the place of the feed-forward of some layers.

    Of `num_experts`, each `width` wide, a token goes to `num_per_token`, weighed by the router's probabilities; where
    these are `normalised`, by their shares of the sum. Besides, it goes to an expert `shared_width` wide, None where
    there is none. `layers` tells the layers that are mixtures.
    """

    num_experts: int
    num_per_token: int
    width: int
    normalised: bool
    layers: tuple[bool, ...]
    shared_width: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the cache, the kernels and the laws must know of a model, however it is written.

    `windows` holds each layer's sliding window in tokens, None where the layer sees everything. `experts` are those of
    a mixture, None where every token meets all weights.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    windows: tuple[int | None, ...]
    experts: ExpertConfig | None = None

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def softmax(self, layer: int) -> Softmax:
        """Return the softmax of a layer's attention."""
        return Softmax(scale=self.head_dim**-0.5, window=self.windows[layer])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder-only transformer with rotary positions, RMS norms and a gated SiLU feed-forward."""

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def shared_config(file: ConfigFile, architecture: str, source: str) -> ModelConfig:
    """Return the configuration that `file` describes by what all families share: no windows, biases or head norms.

    Raises UsageError for what no family here has; `source` is the file named in the message.
    """
    if file.hidden_act != "silu":
        raise UsageError(f"{source}: hidden_act {named(file.hidden_act)} is not supported; only silu is.")
    for bias in ("attention_bias", "mlp_bias"):
        if getattr(file, bias):
            raise UsageError(f"{source}: {bias} is not supported; use a model without it.")
    if file.quantization_config:
        raise UsageError(f"{source}: quantised weights are not supported; use the bfloat16 or float32 original.")

    heads, layers, eos = file.num_attention_heads, file.num_hidden_layers, file.eos_token_id
    kv_heads = file.num_key_value_heads or heads
    if heads % kv_heads:
        raise UsageError(f"{source}: {heads} query heads cannot share {kv_heads} KV heads; the file is damaged.")
    if file.head_dim is None and file.hidden_size % (2 * heads):
        raise UsageError(
            f"{source}: hidden_size {file.hidden_size} does not make {heads} heads of one even size; give head_dim."
        )
    rope = _rope(file, source)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=file.head_dim or file.hidden_size // heads,
        max_positions=file.max_position_embeddings,
        norm_eps=file.rms_norm_eps,
        rope_theta=10000.0 if rope.rope_theta is None else rope.rope_theta,
        rope_scaling=_rope_scaling(rope, file, source),
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
        "hidden_act": "silu",
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
        "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
    }[scaling.kind]
    given = {name: fields[name] for name in used if fields[name] is not None}
    original = {"original_max_position_embeddings": scaling.original_max_positions}
    return {"rope_type": scaling.kind, "type": scaling.kind} | given | original


def _rope(file: ConfigFile, source: str) -> RopeFile:
    """Rotary settings from either spelling: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    base = {} if file.rope_theta is None else {"rope_theta": file.rope_theta}
    given = base | (file.rope_scaling or {}) | (file.rope_parameters or {})
    for name in ("mscale", "mscale_all_dim", "truncate"):
        if name in given:
            raise UsageError(f"{source}: the rotary setting {name} is not supported; use a model without it.")
    if LAYER_TYPES & given.keys():
        raise UsageError(
            f"{source}: rope_parameters for each kind of layer are not supported; use a model of one rotation."
        )
    rope = checked(given, RopeFile, f"{source}: rotary settings")
    if not {file.partial_rotary_factor, rope.partial_rotary_factor} <= {None, 1.0}:
        raise UsageError(f"{source}: partial_rotary_factor is not supported; use a model that rotates whole heads.")
    return rope


def _rope_scaling(rope: RopeFile, file: ConfigFile, source: str) -> RopeScaling | None:
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise UsageError(f"{source}: rope_type {named(kind)} is not supported; use default, linear, llama3 or yarn.")
    if rope.factor is None:
        raise UsageError(f"{source}: rope_type {kind} needs a factor; add one to the rotary settings.")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
    given = {name: getattr(rope, name) for name in optional if getattr(rope, name) is not None}
    original = rope.original_max_position_embeddings or file.max_position_embeddings
    scaling = RopeScaling(kind=kind, factor=rope.factor, original_max_positions=original, **given)
    if kind == "llama3" and not scaling.low_freq_factor < scaling.high_freq_factor:
        raise UsageError(f"{source}: high_freq_factor must be above low_freq_factor; {FETCH}.")
    if kind == "yarn" and not scaling.beta_slow < scaling.beta_fast:
        raise UsageError(f"{source}: beta_fast must be above beta_slow; {FETCH}.")
    return scaling


def _check_layer_types(file: ConfigFile, source: str) -> None:
    """Raise UsageError where the kinds of layers, if they are given, are unknown ones or too few."""
    if not (kinds := file.layer_types):
        return
    if strange := sorted(set(kinds) - LAYER_TYPES):
        raise UsageError(f"{source}: layer_types holds {named(strange[0])}, which is not supported; use another model.")
    if len(kinds) != file.num_hidden_layers:
        raise UsageError(f"{source}: layer_types are {len(kinds)} and the layers {file.num_hidden_layers}; {FETCH}.")

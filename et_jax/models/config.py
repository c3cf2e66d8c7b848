"""What the decoder must know of a model, and what a Hugging Face `config.json` says of one, whatever its family."""

import dataclasses
from collections.abc import Hashable
from typing import Any, Literal

from et_jax.errors import UsageError
from et_jax.io.schema import FETCH, ConfigFile, RopeFile, checked, named
from et_jax.models.encodings import encoding_of
from et_jax.softmax import Softmax

FULL, SLIDING = "full_attention", "sliding_attention"
LAYER_TYPES = {FULL, SLIDING}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClampedSwish:
    """Gating by `(up + 1) gate sigmoid(alpha gate)`, gate bounded above and up on both sides by `limit` (gpt-oss)."""

    alpha: float
    limit: float


Activation = Literal["silu", "gelu_tanh"] | ClampedSwish
"""What a feed-forward makes of its gate, and how that opens what stands beside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones only, blending between
    the two corner wavelengths (Llama 3.1); `yarn` blends by rotation count and scales the rotation
    (Peng et al. 2023, section 3). `longrope` divides each frequency by a factor of its own, of `long_factors` in a
    model that reads more than the original length and of `short_factors` in one that does not, and scales the
    rotation (Ding et al. 2024). Where `truncate`, `yarn` blends between whole channels.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """How a layer turns queries and keys: pair i of the first `dim` channels by theta^(-2i / dim) a position.

    `max_positions` is what the model reads at most, by which `longrope` chooses its factors.
    """

    theta: float
    dim: int
    max_positions: int
    scaling: RopeScaling | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The mixture of experts that stands in the place of the feed-forward of some layers.

    Of `num_experts`, each `width` wide, a token goes to `num_per_token`, weighed by the router's probabilities; where
    these are `normalised`, by their shares of the sum. Besides, it goes to an expert `shared_width` wide, None where
    there is none. `layers` tells the layers that are mixtures, `biases` whether router and experts have some, and
    `activation` is that of the experts' gates.
    """

    num_experts: int
    num_per_token: int
    width: int
    normalised: bool
    layers: tuple[bool, ...]
    shared_width: int | None = None
    biases: bool = False
    activation: Activation = "silu"


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

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kind of every layer: those of one kind differ in their weights alone. Here no two are known to."""
        return tuple(range(self.num_layers))

    def softmax(self, layer: int) -> Softmax:
        """Return the softmax of a layer's attention."""
        return Softmax(scale=self.head_dim**-0.5, window=self.windows[layer])

    def reading(self, length: int) -> "ModelShape":
        """Return the model as it reads texts of at most `length` tokens: itself, if it reads long ones alike."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(ModelShape):
    """A decoder-only transformer with rotary positions, RMS norms and a gated feed-forward.

    hidden_size, intermediate_size: widths of the residual stream and of the feed-forward.
    norm_eps: added to the mean square in a norm.
    norm_offset: added in float32 to a norm's weights before they multiply; 1 where files hold the weights less 1.
    norms: where norms stand: `before` attention and feed-forward, `after` them, or `around` them, at both places.
    qkv_bias, o_bias: whether queries, keys and values have biases, and whether what attention gives has one.
    sinks: whether each query head has a logit of its own in the sum that weights are divided by.
    qk_norm, qk_norm_over: whether queries and keys are normalised, and over what: each `head`, or the `width` of all.
    activation: of the feed-forward's gate.
    rope_theta, rope_scaling: of the rotary positions.
    window_rope_theta: base of the layers that have a window, where they have one of their own, unscaled.
    rope_dim: the first channels of a head that are turned, None for all.
    unrotated: layers that know no positions, in ascending order.
    score_scale: factor on query . key, None for head_dim^-0.5.
    score_cap, logit_cap: soft caps on the scores of attention and on the logits.
    embedding_scale, residual_scale: factors on the embedding, and on what a layer adds to the residual stream.
    logit_divisor: what the logits are divided by.
    tie_embeddings: whether the embedding is the output matrix too.
    """

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    window_rope_theta: float | None = None
    rope_dim: int | None = None
    unrotated: tuple[int, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "width"] = "head"
    norm_offset: float = 0.0
    norms: Literal["before", "after", "around"] = "before"
    activation: Literal["silu", "gelu_tanh"] = "silu"
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    tie_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kinds(self) -> tuple[Hashable, ...]:
        """The kind of every layer: those of one kind differ in their weights alone."""
        mixes = (False,) * self.num_layers if self.experts is None else self.experts.layers
        return tuple((self.softmax(layer), self.rope(layer), mixes[layer]) for layer in range(self.num_layers))

    def softmax(self, layer: int) -> Softmax:
        """Return the softmax of a layer's attention, without its sinks, which are weights."""
        scale = self.head_dim**-0.5 if self.score_scale is None else self.score_scale
        return Softmax(scale=scale, soft_cap=self.score_cap, window=self.windows[layer])

    def reading(self, length: int) -> "ModelConfig":
        """Return the model for texts of at most `length` tokens, for which `longrope` may take its short factors."""
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope" or length > scaling.original_max_positions:
            return self
        return dataclasses.replace(self, max_positions=min(self.max_positions, scaling.original_max_positions))

    def rope(self, layer: int) -> Rope | None:
        """Return how a layer turns its queries and keys, None where it does not."""
        if layer in self.unrotated:
            return None
        own = self.window_rope_theta is not None and self.windows[layer] is not None
        return Rope(
            theta=self.window_rope_theta if own and self.window_rope_theta is not None else self.rope_theta,
            dim=self.rope_dim or self.head_dim,
            max_positions=self.max_positions,
            scaling=None if own else self.rope_scaling,
        )


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

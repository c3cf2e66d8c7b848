"""The configuration of a model: what the decoder must know of it."""

import dataclasses
from collections.abc import Hashable
from typing import Literal

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

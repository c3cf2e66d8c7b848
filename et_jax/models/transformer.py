"""The transformer: weights as a pytree, and `forward`, which knows no cache, page, mask or kernel."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from et_jax.models.config import ExpertConfig, ModelConfig
from et_jax.models.experts import Experts, SharedExpert, choose, gate, mixed
from et_jax.models.layers import feed_forward, linear, rms_norm, rope_angles, rotate
from et_jax.models.weights import Dense, Weight, num_bytes, num_numbers
from et_jax.softmax import Softmax
from et_jax.types import pytree

T = TypeVar("T")
Memory = TypeVar("Memory")


@runtime_checkable
class Attend(Protocol):
    """Attention as the model sees it: new queries, keys and values in; mixed values out.

    `memory` is whatever the caller threads through the layers (a KV cache, a mask, nothing at all), `softmax` what
    turns the layer's scores into weights.
    """

    def __call__(
        self,
        layer: int,
        q: Float[Array, "b t h d"],
        k: Float[Array, "b t k d"],
        v: Float[Array, "b t k d"],
        memory: Any,
        softmax: Softmax,
    ) -> tuple[Float[Array, "b t h d"], Any]: ...


@runtime_checkable
class Mix(Protocol):
    """A layer's mixture of experts as the model sees it: tokens in, and out what their experts make of them.

    `memory` as in `Attend`.
    """

    def __call__(
        self, layer: int, experts: Experts, x: Float[Array, "b t w"], memory: Any
    ) -> tuple[Float[Array, "b t w"], Any]: ...


@pytree
class LayerParams:
    """Weights of one layer. Biases and head norms are None where a family has none.

    A layer has the matrices of a feed-forward, or `experts`.

    With `hd` query heads times head dim and `kd` KV heads times head dim, `q` is "hd w", `k` and `v` "kd w", `o`
    "w hd", `gate` and `up` "f w" and `down` "w f", [out, in].
    """

    attention_norm: Float[Array, " w"]
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_bias: Float[Array, " hd"] | None
    k_bias: Float[Array, " kd"] | None
    v_bias: Float[Array, " kd"] | None
    q_norm: Float[Array, " d"] | None
    k_norm: Float[Array, " d"] | None
    ffn_norm: Float[Array, " w"]
    gate: Weight | None
    up: Weight | None
    down: Weight | None
    experts: Experts | None = None


@pytree
class Params:
    """Weights of a model. `embedding` is "v w", and `head`, which is None where the embedding serves as it too."""

    embedding: Weight
    layers: tuple[LayerParams, ...]
    final_norm: Float[Array, " w"]
    head: Weight | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """A weight before it exists: its shape, the logical name of each axis, and its initial deviation.

    `deviation` None starts at one (norms), 0 at zero (biases).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    deviation: float | None


def _unchecked(cls: type[T], **children) -> T:
    """Return a `cls` around children that are no arrays, which a shape-checking `__init__` would refuse."""
    tree = object.__new__(cls)
    vars(tree).update(children)
    return tree


_OF_FEED_FORWARD = ("gate", "up", "down", "experts")


def describe(config: ModelConfig) -> Params:
    """Return the tree of `WeightSpec` that a model of this configuration holds."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = {
        "vocab": c.vocab_size,
        "width": c.hidden_size,
        "ffn": c.intermediate_size,
        "heads": queries,
        "kv_heads": keys,
        "head_dim": c.head_dim,
    }

    def spec(*axes: str, deviation: float | None = 0.02) -> WeightSpec:
        return WeightSpec(shape=tuple(sizes[axis] for axis in axes), axes=axes, deviation=deviation)

    def matrix(*axes: str, deviation: float = 0.02) -> Dense:
        return _unchecked(Dense, array=spec(*axes, deviation=deviation))

    residual = 0.02 / (2 * c.num_layers) ** 0.5  # GPT-2: the sum over layers keeps its variance
    attending = _unchecked(
        LayerParams,
        attention_norm=spec("width", deviation=None),
        q=matrix("heads", "width"),
        k=matrix("kv_heads", "width"),
        v=matrix("kv_heads", "width"),
        o=matrix("width", "heads", deviation=residual),
        q_bias=spec("heads", deviation=0.0) if c.qkv_bias else None,
        k_bias=spec("kv_heads", deviation=0.0) if c.qkv_bias else None,
        v_bias=spec("kv_heads", deviation=0.0) if c.qkv_bias else None,
        q_norm=spec("head_dim", deviation=None) if c.qk_norm else None,
        k_norm=spec("head_dim", deviation=None) if c.qk_norm else None,
        ffn_norm=spec("width", deviation=None),
    )

    def layer(**parts) -> LayerParams:
        return _unchecked(LayerParams, **vars(attending) | dict.fromkeys(_OF_FEED_FORWARD) | parts)

    def matrices(*lead: str, width: str) -> dict[str, Dense]:
        up = matrix(*lead, width, "width")
        return {"gate": up, "up": up, "down": matrix(*lead, "width", width, deviation=residual)}

    dense = mixture = layer(**matrices(width="ffn"))
    if c.experts is not None:
        sizes |= {"experts": c.experts.num_experts, "expert_ffn": c.experts.width, "one": 1}
        sizes |= {"shared_ffn": c.experts.shared_width or 0}
        shared = _unchecked(SharedExpert, router=spec("one", "width"), **matrices(width="shared_ffn"))
        experts = _unchecked(
            Experts,
            router=spec("experts", "width"),
            **matrices("experts", width="expert_ffn"),
            shared=None if c.experts.shared_width is None else shared,
        )
        mixture = layer(experts=experts)
    return _unchecked(
        Params,
        embedding=matrix("vocab", "width"),
        layers=tuple(mixture if mixes else dense for mixes in _mixtures(c)),
        final_norm=spec("width", deviation=None),
        head=None if c.tie_embeddings else matrix("vocab", "width"),
    )


def _mixtures(config: ModelConfig) -> tuple[bool, ...]:
    """Which layers are mixtures of experts."""
    return (False,) * config.num_layers if config.experts is None else config.experts.layers


def abstract(config: ModelConfig, dtype: DTypeLike) -> Params:
    """Return the shapes of a model's weights in `dtype`, as a tree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), describe(config))


def num_weights(config: ModelConfig) -> int:
    """Return how many numbers a model of this configuration holds."""
    return _sum_over_layers(config, describe, num_numbers)


def weight_bytes(config: ModelConfig, dtype: DTypeLike) -> int:
    """Return the bytes that a model of this configuration holds in `dtype`."""
    return _sum_over_layers(config, lambda one: abstract(one, dtype), num_bytes)


def _sum_over_layers(config: ModelConfig, tree: Callable[[ModelConfig], Params], count: Callable[[Any], int]) -> int:
    """Return the `count` of a model's tree, from one of its layers of each kind, for these are alike."""
    held, total = Counter(_mixtures(config)), 0
    for mixes, times in held.items():
        experts = dataclasses.replace(config.experts, layers=(mixes,)) if config.experts is not None else None
        one = tree(dataclasses.replace(config, num_layers=1, windows=config.windows[:1], experts=experts))
        layer = count(one.layers[0])
        total += times * layer + (0 if total else count(one) - layer)
    return total


def num_multiplied(config: ModelConfig) -> int:
    """Return the weights a token is multiplied with: all, less an embedding that is not the head too.

    Of experts these are the ones that a token goes to as trained.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    mixture = config.experts
    if mixture is not None:
        looked_up += sum(mixture.layers) * (mixture.num_experts - mixture.num_per_token) * expert_weights(config)
    return num_weights(config) - looked_up


def expert_weights(config: ModelConfig) -> int:
    """Return the numbers of one expert of one layer; 0 where there are none."""
    return 0 if config.experts is None else 3 * config.experts.width * config.hidden_size


def initialise(config: ModelConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Params:
    """Return random weights drawn as `describe` says."""
    specs, treedef = jax.tree.flatten(describe(config))

    def draw(spec: WeightSpec, key: PRNGKeyArray) -> Array:
        if spec.deviation is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.deviation * jax.random.normal(key, spec.shape)).astype(dtype)

    return treedef.unflatten([draw(spec, k) for spec, k in zip(specs, jax.random.split(key, len(specs)), strict=True)])


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "b t"],
    positions: Int[Array, "b t"],
    attend: Attend,
    memory: Memory,
    mix: Mix | None = None,
) -> tuple[Float[Array, "b t v"], Memory]:
    """Return float32 logits at every position and the memory after all layers.

    Experts are mixed as trained unless `mix` does it.

    Under jit, logits the caller ignores are never computed.
    """
    # the barrier keeps XLA from working every cosine out anew for each layer and head
    angles = jax.lax.optimization_barrier(rope_angles(config, positions))
    x = params.embedding.rows(tokens)
    for index, layer in enumerate(params.layers):
        with jax.named_scope(f"layer_{index}"):
            x, memory = block(layer, config, index, x, angles, attend, memory, mix)
    return logits(params, config, x), memory


def block(
    layer: LayerParams,
    config: ModelConfig,
    index: int,
    x: Float[Array, "b t w"],
    angles: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    attend: Attend,
    memory: Memory,
    mix: Mix | None = None,
) -> tuple[Float[Array, "b t w"], Memory]:
    """Return the residual stream after layer `index`, and the memory its attention left."""
    q, k, v = _before_attention(layer, config, x, angles)
    with jax.named_scope("attend"):
        out, memory = attend(index, q, k, v, memory, config.softmax(index))
    if layer.experts is None or config.experts is None:
        return _after_attention(layer, config, x, out), memory
    x, y = _before_experts(layer, config, x, out)
    with jax.named_scope("mix"):
        if mix is None:
            return x + mix_as_trained(config.experts, layer.experts, y), memory
        y, memory = mix(index, layer.experts, y, memory)
    return x + y, memory


def mix_as_trained(config: ExpertConfig, experts: Experts, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
    """Return what a layer's experts make of tokens, by products that can be differentiated."""
    flat = x.reshape(-1, x.shape[-1])
    return mixed(experts, flat, choose(config, gate(experts, flat)), "ragged").reshape(x.shape)


@partial(jax.jit, static_argnums=1)  # for the trace, which layers that are alike share
def _before_attention(
    layer: LayerParams,
    config: ModelConfig,
    x: Float[Array, "b t w"],
    angles: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t k d"], Float[Array, "b t k d"]]:
    c, (b, t, _) = config, x.shape
    y = rms_norm(x, layer.attention_norm, c.norm_eps)
    q = linear(y, layer.q, layer.q_bias).reshape(b, t, c.num_heads, c.head_dim)
    k = linear(y, layer.k, layer.k_bias).reshape(b, t, c.num_kv_heads, c.head_dim)
    v = linear(y, layer.v, layer.v_bias).reshape(b, t, c.num_kv_heads, c.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
    return rotate(q, *angles), rotate(k, *angles), v


@partial(jax.jit, static_argnums=1)
def _after_attention(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "b t w"], out: Float[Array, "b t h d"]
) -> Float[Array, "b t w"]:
    x, y = _attended(layer, config, x, out)
    assert layer.gate is not None and layer.up is not None and layer.down is not None
    return x + feed_forward(y, layer.gate, layer.up, layer.down)


def _attended(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "b t w"], out: Float[Array, "b t h d"]
) -> tuple[Float[Array, "b t w"], Float[Array, "b t w"]]:
    """The residual stream after attention, and normed."""
    x = x + linear(out.reshape(*out.shape[:2], -1), layer.o)
    return x, rms_norm(x, layer.ffn_norm, config.norm_eps)


_before_experts = partial(jax.jit, static_argnums=1)(_attended)


def logits(params: Params, config: ModelConfig, x: Float[Array, "b t w"]) -> Float[Array, "b t v"]:
    """Return float32 logits of residual-stream states."""
    weight = params.embedding if params.head is None else params.head
    return weight.matmul(rms_norm(x, params.final_norm, config.norm_eps))

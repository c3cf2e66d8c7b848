"""The weights of a transformer as a pytree: their shapes and sizes, derived from a configuration."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.experts import Experts, SharedExpert
from et_jax.models.stacks import layers_by_place
from et_jax.models.weights import Dense, Int8, Matrix, Weight, is_weight, num_bytes, num_numbers
from et_jax.types import pytree

T = TypeVar("T")


@pytree
class LayerParams:
    """Weights of one layer. Biases and norms are None where a family has none.

    A layer has the matrices of a feed-forward, or `experts`. `attention_norm` and `ffn_norm` precede attention and
    feed-forward, `attention_out_norm` and `ffn_out_norm` follow them. `q_norm` and `k_norm` span a head, or all heads.
    `sinks` are a logit per query head, which only the denominator of its softmax includes.
    With `hd` query heads times head dim and `kd` KV heads times head dim, `q` is "hd w", `k` and `v` "kd w", `o`
    "w hd", `gate` and `up` "f w" and `down` "w f", [out, in].
    """

    attention_norm: Float[Array, " w"] | None
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_bias: Float[Array, " hd"] | None
    k_bias: Float[Array, " kd"] | None
    v_bias: Float[Array, " kd"] | None
    o_bias: Float[Array, " w"] | None = None
    sinks: Float[Array, " h"] | None = None
    q_norm: Float[Array, " nq"] | None
    k_norm: Float[Array, " nk"] | None
    attention_out_norm: Float[Array, " w"] | None
    ffn_norm: Float[Array, " w"] | None
    gate: Matrix | None
    up: Matrix | None
    down: Matrix | None
    ffn_out_norm: Float[Array, " w"] | None
    experts: Experts | None = None


@pytree
class Params:
    """Weights of a model. `embedding` and `head` are "v w"; `head` is None if it is tied to the embedding.

    `layers` has the weights of every layer in order. With layer stacking it has those of every place (`stacks.Stack`),
    where the layers of a place share arrays with a leading axis of turns.
    """

    embedding: Weight
    layers: tuple[LayerParams, ...]
    final_norm: Float[Array, " w"]
    head: Matrix | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightSpec:
    """The description of a weight: its shape, the logical name of each axis, and its initial standard deviation.

    `deviation` None initialises to one (norms), 0 to zero (biases).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    deviation: float | None


def _unchecked(cls: type[T], **children) -> T:
    """Return a `cls` with children that are not arrays, which a shape-checking `__init__` would reject."""
    tree = object.__new__(cls)
    vars(tree).update(children)
    return tree


_OF_FEED_FORWARD = ("gate", "up", "down", "experts")


def describe(config: ModelConfig) -> Params:
    """Return the tree of `WeightSpec` of a model of this configuration."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = {
        "vocab": c.vocab_size,
        "width": c.hidden_size,
        "ffn": c.intermediate_size,
        "heads": queries,
        "kv_heads": keys,
        "each_head": c.num_heads,
        "head_dim": c.head_dim,
    }

    def spec(*axes: str, deviation: float | None = 0.02) -> WeightSpec:
        return WeightSpec(shape=tuple(sizes[axis] for axis in axes), axes=axes, deviation=deviation)

    def matrix(*axes: str, deviation: float = 0.02) -> Dense:
        return _unchecked(Dense, array=spec(*axes, deviation=deviation))

    def norm(axis: str) -> WeightSpec:
        return spec(axis, deviation=0.0 if c.norm_offset else None)

    over = {"head": ("head_dim", "head_dim"), "width": ("heads", "kv_heads")}[c.qk_norm_over]
    before, after = c.norms != "after", c.norms != "before"
    residual = 0.02 / (2 * c.num_layers) ** 0.5  # GPT-2: the sum over layers keeps its variance
    attending = _unchecked(
        LayerParams,
        attention_norm=norm("width") if before else None,
        q=matrix("heads", "width"),
        k=matrix("kv_heads", "width"),
        v=matrix("kv_heads", "width"),
        o=matrix("width", "heads", deviation=residual),
        q_bias=spec("heads", deviation=0.0) if c.qkv_bias else None,
        k_bias=spec("kv_heads", deviation=0.0) if c.qkv_bias else None,
        v_bias=spec("kv_heads", deviation=0.0) if c.qkv_bias else None,
        o_bias=spec("width", deviation=0.0) if c.o_bias else None,
        sinks=spec("each_head", deviation=0.0) if c.sinks else None,
        q_norm=norm(over[0]) if c.qk_norm else None,
        k_norm=norm(over[1]) if c.qk_norm else None,
        attention_out_norm=norm("width") if after else None,
        ffn_norm=norm("width") if before else None,
        ffn_out_norm=norm("width") if after else None,
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
        biases = {"router": ("experts",), **dict.fromkeys(("gate", "up"), ("experts", "expert_ffn"))}
        biases |= {"down": ("experts", "width")}
        experts = _unchecked(
            Experts,
            router=spec("experts", "width"),
            **matrices("experts", width="expert_ffn"),
            shared=None if c.experts.shared_width is None else shared,
            turn=None,
            **{
                f"{name}_bias": spec(*axes, deviation=0.0) if c.experts.biases else None
                for name, axes in biases.items()
            },
        )
        mixture = layer(experts=experts)
    return _unchecked(
        Params,
        embedding=matrix("vocab", "width"),
        layers=tuple(mixture if mixes else dense for mixes in _mixtures(c)),
        final_norm=norm("width"),
        head=None if c.tie_embeddings else matrix("vocab", "width"),
    )


def _mixtures(config: ModelConfig) -> tuple[bool, ...]:
    """Return for each layer whether it is a mixture of experts."""
    return (False,) * config.num_layers if config.experts is None else config.experts.layers


def abstract(config: ModelConfig, dtype: DTypeLike, quantize: str | None = None, *, stacked: bool = False) -> Params:
    """Return the shapes of a model's weights in `dtype`, as a tree of `jax.ShapeDtypeStruct`.

    With `quantize` its matrices have that form; equal layers may be `stacked`.
    """

    def shape(node: Dense | WeightSpec) -> Any:
        if quantize is None or not isinstance(node, Dense):
            return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), node)
        array, scale = (
            jax.ShapeDtypeStruct(shape, kind)
            for shape, kind in ((node.shape, jnp.int8), (node.shape[:-1], jnp.float32))
        )
        return _unchecked(Int8, array=array, scale=scale, dtype=np.dtype(dtype))

    def joined(*leaves: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((len(leaves), *leaves[0].shape), leaves[0].dtype)

    found = jax.tree.map(shape, describe(config), is_leaf=is_weight)
    return in_stacks(found, config, joined) if stacked else found


def in_stacks(params: Params, config: ModelConfig, joined: Callable[..., Any]) -> Params:
    """Return a tree of weights with equal layers stacked: `joined` combines their leaves, in order."""
    layers = []
    for numbers in layers_by_place(config):
        first, *others = [params.layers[number] for number in numbers]
        layers.append(jax.tree.map(joined, first, *others) if others else first)
    return _unchecked(Params, **vars(params) | {"layers": tuple(layers)})


def is_stacked(params: Params, config: ModelShape) -> bool:
    """Return whether any layers of a model are stacked."""
    return len(params.layers) < config.num_layers


def num_weights(config: ModelConfig) -> int:
    """Return the number of parameters of a model of this configuration."""
    return num_numbers(describe(config))


def weight_bytes(config: ModelConfig, dtype: DTypeLike, quantize: str | None = None) -> int:
    """Return the bytes of a model of this configuration in `dtype`, with matrices in the form `quantize`."""
    return num_bytes(abstract(config, dtype, quantize))


def num_multiplied(config: ModelConfig) -> int:
    """Return the number of parameters that a token is multiplied with: all, except an untied embedding.

    Of experts it counts the trained number per token.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    mixture = config.experts
    if mixture is not None:
        looked_up += sum(mixture.layers) * (mixture.num_experts - mixture.num_per_token) * expert_weights(config)
    return num_weights(config) - looked_up


def expert_weights(config: ModelConfig) -> int:
    """Return the number of parameters of a single expert; 0 without experts."""
    if config.experts is None:
        return 0
    width, w = config.experts.width, config.hidden_size
    return 3 * width * w + (2 * width + w if config.experts.biases else 0)

"""The transformer: weights as a pytree, and `forward`, which knows no cache, page, mask or kernel."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from et_jax.models.config import ExpertConfig, ModelConfig, ModelShape
from et_jax.models.experts import Experts, SharedExpert, choose, gate, mixed
from et_jax.models.layers import feed_forward, linear, rms_norm, rope_angles, rotate
from et_jax.models.stacks import Layer, Threaded, entry, stacks_of, through
from et_jax.models.weights import Dense, Int8, Weight, is_weight, num_bytes, num_numbers
from et_jax.softmax import Softmax
from et_jax.types import pytree, replace

T = TypeVar("T")
Memory = TypeVar("Memory")


@runtime_checkable
class Attend(Protocol):
    """Attention as the model sees it: new queries, keys and values in; mixed values out.

    `memory` is whatever the caller threads through the layers (a KV cache, a mask, nothing at all), `softmax` what
    turns the layer's scores into weights. `layer` is a number, a `stacks.Layer` where the caller reads several alike.
    """

    def __call__(
        self,
        layer: Any,
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
        self, layer: Any, experts: Experts, x: Float[Array, "b t w"], memory: Any
    ) -> tuple[Float[Array, "b t w"], Any]: ...


@pytree
class LayerParams:
    """Weights of one layer. Biases and norms are None where a family has none.

    A layer has the matrices of a feed-forward, or `experts`. `attention_norm` and `ffn_norm` stand before attention and
    feed-forward, `attention_out_norm` and `ffn_out_norm` after them; `q_norm` and `k_norm` span a head, or all heads.
    `sinks` are a logit for each query head, in the sum of its softmax alone.
    With `hd` query heads times head dim and `kd` KV heads times head dim, `q` is "hd w", `k` and `v` "kd w", `o`
    "w hd", `gate` and `up` "f w" and `down` "w f", [out, in].
    """

    attention_norm: Float[Array, " w"] | None
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_bias: Float[Array, " hd"] | None
    k_bias: Float[Array, " kd"] | None
    v_bias: Float[Array, " kd"] | None
    o_bias: Float[Array, " w"] | None = None
    sinks: Float[Array, " h"] | None = None
    q_norm: Float[Array, " nq"] | None
    k_norm: Float[Array, " nk"] | None
    attention_out_norm: Float[Array, " w"] | None
    ffn_norm: Float[Array, " w"] | None
    gate: Weight | None
    up: Weight | None
    down: Weight | None
    ffn_out_norm: Float[Array, " w"] | None
    experts: Experts | None = None


@pytree
class Params:
    """Weights of a model. `embedding` is "v w", and `head`, which is None where the embedding serves as it too.

    `layers` holds the weights of every layer in order. Where layers that are alike are stacked, it holds those of every
    place (`stacks.Stack`), of the layers at one in one array, which leads with their turns.
    """

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
    """Which layers are mixtures of experts."""
    return (False,) * config.num_layers if config.experts is None else config.experts.layers


def abstract(config: ModelConfig, dtype: DTypeLike, quantize: str | None = None, *, stacked: bool = False) -> Params:
    """Return the shapes of a model's weights in `dtype`, as a tree of `jax.ShapeDtypeStruct`.

    With `quantize` its matrices are in that form, and layers that are alike may be `stacked`.
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
    """Return a tree of weights with those of layers that are alike in one, `joined` of the leaves of each, in order."""
    layers = []
    for stack in stacks_of(config, stacked=True):
        for offset in range(stack.period):
            of_place = params.layers[stack.first : stack.first + stack.num_layers][offset :: stack.period]
            layers.append(of_place[0] if stack.depth == 1 else jax.tree.map(joined, *of_place))
    return _unchecked(Params, **vars(params) | {"layers": tuple(layers)})


def is_stacked(params: Params, config: ModelShape) -> bool:
    """Return whether there are layers of a model that lie in one array."""
    return len(params.layers) < config.num_layers


def num_weights(config: ModelConfig) -> int:
    """Return how many numbers a model of this configuration holds."""
    return num_numbers(describe(config))


def weight_bytes(config: ModelConfig, dtype: DTypeLike, quantize: str | None = None) -> int:
    """Return the bytes that a model of this configuration holds in `dtype`, its matrices as `quantize` says."""
    return num_bytes(abstract(config, dtype, quantize))


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
    if config.experts is None:
        return 0
    width, w = config.experts.width, config.hidden_size
    return 3 * width * w + (2 * width + w if config.experts.biases else 0)


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
    alike: Sequence[Hashable] | None = None,
) -> tuple[Float[Array, "b t v"], Memory]:
    """Return float32 logits at every position and the memory after all layers.

    Experts are mixed as trained unless `mix` does it. `alike` says, by a value for every layer, which ones `attend` and
    `mix` serve by one program; they are given the `stacks.Layer` then, and a `stacks.Threaded` memory, to whose `told`
    every layer adds one entry. Of these, layers in one stack are run by a scan. None is that every layer is by itself.

    Under jit, logits the caller ignores are never computed.
    """
    stacks = stacks_of(config, is_stacked(params, config))
    angles, x = angles_of_layers(config, positions), embed(params, config, tokens)

    def run(layer: Layer, carried: tuple[Array, Any]) -> tuple[tuple[Array, Any], Any]:
        (x, before), weights = carried, params.layers[layer.place]
        if layer.turn is not None:
            weights = of_turn(weights, layer.turn)
        with jax.named_scope(f"layer_{layer.like}"):
            if alike is None:
                return block(weights, config, layer.like, x, angles[layer.like], attend, before, mix), None
            held = Threaded(carried=before)
            x, held = block(weights, config, layer, x, angles[layer.like], attend, held, mix)
        [told] = held.told
        return (x, held.carried), told

    before: Any = memory
    (x, carried), told = through(stacks, alike, run, (x, before if alike is None else before.carried))
    after = carried if alike is None else Threaded(carried=carried, told=told)
    return logits(params, config, x), cast(Memory, after)


def of_turn(layers: LayerParams, turn: int | Int[Array, ""]) -> LayerParams:
    """Return the weights of one layer of those that lie at a place, its experts where they lie."""

    def taken(node: Any) -> Any:
        return node.of_turn(turn) if isinstance(node, Experts) else entry(node, turn)

    return jax.tree.map(taken, layers, is_leaf=lambda node: isinstance(node, Experts))


def angles_of_layers(
    config: ModelConfig, positions: Int[Array, "b t"]
) -> tuple[tuple[Float[Array, "b t r"], Float[Array, "b t r"]], ...]:
    """Return the cosines and sines by which each layer turns, the same arrays where layers turn alike."""
    ropes, dim = [config.rope(layer) for layer in range(config.num_layers)], config.rope_dim or config.head_dim
    # the barrier keeps XLA from working every cosine out anew for each layer and head
    found = {rope: jax.lax.optimization_barrier(rope_angles(rope, dim, positions)) for rope in dict.fromkeys(ropes)}
    return tuple(found[rope] for rope in ropes)


def embed(params: Params, config: ModelConfig, tokens: Int[Array, "b t"]) -> Float[Array, "b t w"]:
    """Return the residual stream before the first layer; its scale is rounded to the embedding's dtype."""
    x = params.embedding.rows(tokens)
    return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)


def block(
    layer: LayerParams,
    config: ModelConfig,
    index: int | Layer,
    x: Float[Array, "b t w"],
    angles: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    attend: Attend,
    memory: Memory,
    mix: Mix | None = None,
) -> tuple[Float[Array, "b t w"], Memory]:
    """Return the residual stream after layer `index`, and the memory its attention left."""
    like = index.like if isinstance(index, Layer) else index
    q, k, v = _before_attention(layer, config, x, angles)
    with jax.named_scope("attend"):
        out, memory = attend(index, q, k, v, memory, replace(config.softmax(like), sink_logits=layer.sinks))
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
    return mixed(experts, flat, choose(config, gate(experts, flat)), "ragged", config.activation).reshape(x.shape)


@partial(jax.jit, static_argnums=1)  # for the trace, which layers that are alike share
def _before_attention(
    layer: LayerParams,
    config: ModelConfig,
    x: Float[Array, "b t w"],
    angles: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t k d"], Float[Array, "b t k d"]]:
    c, y = config, _normed(x, layer.attention_norm, config)

    def heads(x: Float[Array, "b t y"]) -> Float[Array, "b t x d"]:
        return x.reshape(*x.shape[:2], -1, c.head_dim)

    q, k, v = linear(y, layer.q, layer.q_bias), linear(y, layer.k, layer.k_bias), linear(y, layer.v, layer.v_bias)
    if c.qk_norm_over == "width":
        q, k = heads(_normed(q, layer.q_norm, c)), heads(_normed(k, layer.k_norm, c))
    else:
        q, k = _normed(heads(q), layer.q_norm, c), _normed(heads(k), layer.k_norm, c)
    return rotate(q, *angles), rotate(k, *angles), heads(v)


@partial(jax.jit, static_argnums=1)
def _after_attention(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "b t w"], out: Float[Array, "b t h d"]
) -> Float[Array, "b t w"]:
    x, y = _attended(layer, config, x, out)
    assert layer.gate is not None and layer.up is not None and layer.down is not None
    y = feed_forward(y, layer.gate, layer.up, layer.down, config.activation)
    return _added(x, _normed(y, layer.ffn_out_norm, config), config)


def _normed(x: Float[Array, "*b w"], weight: Float[Array, " w"] | None, config: ModelConfig) -> Float[Array, "*b w"]:
    """Return `x` after a norm, `x` itself where there is none."""
    return x if weight is None else rms_norm(x, weight, config.norm_eps, config.norm_offset)


def _added(x: Float[Array, "b t w"], y: Float[Array, "b t w"], config: ModelConfig) -> Float[Array, "b t w"]:
    """Return the residual stream `x` with what a half of a layer adds to it."""
    if config.residual_scale != 1:
        y = (y.astype(jnp.float32) * config.residual_scale).astype(y.dtype)
    return x + y


def _attended(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "b t w"], out: Float[Array, "b t h d"]
) -> tuple[Float[Array, "b t w"], Float[Array, "b t w"]]:
    """The residual stream after attention, and normed."""
    attended = linear(out.reshape(*out.shape[:2], -1), layer.o, layer.o_bias)
    x = _added(x, _normed(attended, layer.attention_out_norm, config), config)
    return x, _normed(x, layer.ffn_norm, config)


_before_experts = partial(jax.jit, static_argnums=1)(_attended)


def logits(params: Params, config: ModelConfig, x: Float[Array, "b t w"]) -> Float[Array, "b t v"]:
    """Return float32 logits of residual-stream states."""
    c, weight = config, params.embedding if params.head is None else params.head
    found = weight.matmul(_normed(x, params.final_norm, c))
    if c.logit_divisor != 1:
        found = found / c.logit_divisor
    return found if c.logit_cap is None else c.logit_cap * jnp.tanh(found / c.logit_cap)

"""The transformer as functions: initial weights, and `forward`, which is independent of cache, masks and kernels."""

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from et_jax.models.config import ExpertConfig, ModelConfig
from et_jax.models.experts import Experts, choose, gate, mixed
from et_jax.models.layers import feed_forward, gated, linear, rms_norm, rope_angles, rotate
from et_jax.models.params import LayerParams, Params, WeightSpec, describe, is_stacked
from et_jax.models.stacks import Layer, OfTurn, Threaded, entry, stacks_of, through
from et_jax.softmax import Softmax
from et_jax.types import replace

Memory = TypeVar("Memory")
Angles = tuple[Float[Array, "b t r"], Float[Array, "b t r"]]
"""The cosines and sines of each token's rotary angles, one per pair of channels."""


@runtime_checkable
class Attend(Protocol):
    """Attention as the model calls it: from new queries, keys and values to mixed values.

    `memory` is whatever the caller threads through the layers (a KV cache, a mask, nothing), `softmax` converts
    the layer's scores into weights. `layer` is a number, or a `stacks.Layer` if the caller scans several layers.
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
class AttendProducts(Protocol):
    """Attention to unrotated float32 queries, keys and values, with the `angles` of their rotation.

    The rest is as in `Attend`. Queries, keys and values are still to be rounded to the model's dtype, then rotated.
    """

    def __call__(
        self,
        layer: Any,
        q: Float[Array, "b t h d"],
        k: Float[Array, "b t k d"],
        v: Float[Array, "b t k d"],
        memory: Any,
        softmax: Softmax,
        angles: Angles,
    ) -> tuple[Float[Array, "b t h d"], Any]: ...


@runtime_checkable
class Mix(Protocol):
    """A layer's mixture of experts as the model calls it: from tokens to the weighted outputs of their experts.

    `memory` as in `Attend`.
    """

    def __call__(
        self, layer: Any, experts: OfTurn[Experts], x: Float[Array, "b t w"], memory: Any
    ) -> tuple[Float[Array, "b t w"], Any]: ...


@runtime_checkable
class AddNorm(Protocol):
    """A fused addition to the residual stream and RMS norm: returns the sum, and the normed sum.

    Both are in the dtype of `x`, to which `more` is rounded first. The weight is that of a stacked layer.
    """

    def __call__(
        self,
        x: Float[Array, "n w"],
        more: Float[Array, "n w"],
        weights: Float[Array, "l w"],
        layer: Int[Array, ""],
        *,
        eps: float,
        offset: float,
    ) -> tuple[Float[Array, "n w"], Float[Array, "n w"]]: ...


def initialise(config: ModelConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Params:
    """Return random weights drawn as `describe` specifies."""
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
    add_norm: AddNorm | None = None,
    attend_products: AttendProducts | None = None,
) -> tuple[Float[Array, "b t v"], Memory]:
    """Return float32 logits at every position and the memory after all layers.

    Experts are mixed as trained unless `mix` is given. `alike` has a value per layer; layers with equal values may
    share one program of `attend` and `mix`, which then receive a `stacks.Layer` and a `stacks.Threaded` memory, and
    append one entry per layer to its `outputs`. Such layers of one stack run in a scan. None: none share a program.
    `add_norm`, if given, applies to plain layers with stacked weights: a layer's last addition to the residual stream
    is carried separately, and added by the next layer. `attend_products`, if given, replaces `attend` for those of them
    that have no biases and no norms of queries and keys.

    Under jit, logits the caller ignores are never computed.
    """
    stacks, stacked = stacks_of(config), is_stacked(params, config)
    angles, x = angles_of_layers(config, positions), embed(params, config, tokens)

    def run(layer: Layer, carried: tuple[Any, Any]) -> tuple[tuple[Any, Any], Any]:
        x, before = carried
        if beside is not None:
            with jax.named_scope(f"layer_{layer.like}"):
                threaded, how, own = Threaded(carried=before), (attend, attend_products), params.layers[layer.place]
                x, threaded = _plain_block(own, config, layer, x, angles[layer.like], how, threaded, beside)
            [output] = threaded.outputs
            return (x, threaded.carried), output
        weights = _of_stack(params, layer) if stacked else layer.own(params.layers)
        with jax.named_scope(f"layer_{layer.like}"):
            if alike is None:
                return block(weights, config, layer.like, x, angles[layer.like], attend, before, mix), None
            threaded = Threaded(carried=before)
            x, threaded = block(weights, config, layer, x, angles[layer.like], attend, threaded, mix)
        [output] = threaded.outputs
        return (x, threaded.carried), output

    before: Any = memory
    beside = None
    if add_norm is not None and alike is not None and stacked and all(stack.depth > 1 for stack in stacks):
        beside = add_norm if all(_is_plain(layer, config) for layer in params.layers) else None
    begun: Any = x if beside is None else (x, jnp.zeros(x.shape, jnp.float32))
    (x, carried), outputs = through(stacks, alike, run, (begun, before if alike is None else before.carried))
    if beside is not None:
        x, more = x
        x = x + more.astype(x.dtype)
    after = carried if alike is None else Threaded(carried=carried, outputs=outputs)
    return logits(params, config, x), cast(Memory, after)


def _of_stack(params: Params, layer: Layer) -> OfTurn[LayerParams]:
    """Return the weights of a layer, cut out of those of its place."""
    weights = params.layers[layer.place]
    return OfTurn(each=(weights if layer.turn is None else of_turn(weights, layer.turn),))


def of_turn(layers: LayerParams, turn: int | Int[Array, ""]) -> LayerParams:
    """Return the weights of one layer from those stacked at a place, with experts left in place."""

    def taken(node: Any) -> Any:
        return node.of_turn(turn) if isinstance(node, Experts) else entry(node, turn)

    return jax.tree.map(taken, layers, is_leaf=lambda node: isinstance(node, Experts))


def angles_of_layers(config: ModelConfig, positions: Int[Array, "b t"]) -> tuple[Angles, ...]:
    """Return the cosines and sines of each layer's rotation; layers with equal rotation share arrays."""
    ropes, dim = [config.rope(layer) for layer in range(config.num_layers)], config.rope_dim or config.head_dim
    # the barrier keeps XLA from computing every cosine again for each layer and head
    found = {rope: jax.lax.optimization_barrier(rope_angles(rope, dim, positions)) for rope in dict.fromkeys(ropes)}
    return tuple(found[rope] for rope in ropes)


def embed(params: Params, config: ModelConfig, tokens: Int[Array, "b t"]) -> Float[Array, "b t w"]:
    """Return the residual stream before the first layer; its scale is rounded to the embedding's dtype."""
    x = params.embedding.rows(tokens)
    return x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)


def block(
    weights: OfTurn[LayerParams],
    config: ModelConfig,
    index: int | Layer,
    x: Float[Array, "b t w"],
    angles: Angles,
    attend: Attend,
    memory: Memory,
    mix: Mix | None = None,
) -> tuple[Float[Array, "b t w"], Memory]:
    """Return the residual stream after layer `index`, and the memory that its attention returned."""
    like = index.like if isinstance(index, Layer) else index
    q, k, v = weights.call(lambda one, *given: _before_attention(one, config, *given), x, angles)
    sinks = weights.call(lambda one: one.sinks) if config.sinks else None
    with jax.named_scope("attend"):
        out, memory = attend(index, q, k, v, memory, replace(config.softmax(like), sink_logits=sinks))
    mixes = config.experts
    if mixes is None or not mixes.layers[like]:
        return weights.call(lambda one, *given: _after_attention(one, config, *given), x, out), memory
    x, y = weights.call(lambda one, *given: _before_experts(one, config, *given), x, out)
    experts = weights.part(lambda one: one.experts)
    with jax.named_scope("mix"):
        if mix is None:
            return x + experts.call(partial(mix_as_trained, mixes), y), memory
        y, memory = mix(index, experts, y, memory)
    return x + y, memory


def _is_plain(layer: LayerParams, config: ModelConfig) -> bool:
    """Return whether a layer only makes two additions to the residual stream, each followed by a norm."""
    out = layer.attention_out_norm, layer.ffn_out_norm, layer.o_bias, layer.experts
    there = layer.attention_norm, layer.ffn_norm
    return all(x is None for x in out) and all(x is not None for x in there) and config.residual_scale == 1


def _is_product(layer: LayerParams) -> bool:
    """Return whether queries, keys and values are rotated matrix products, without biases and norms."""
    beside = layer.q_bias, layer.k_bias, layer.v_bias, layer.q_norm, layer.k_norm
    return all(x is None for x in beside)


def _plain_block(
    stacked: LayerParams,
    config: ModelConfig,
    index: Layer,
    carried: tuple[Float[Array, "b t w"], Float[Array, "b t w"]],
    angles: Angles,
    how: tuple[Attend, AttendProducts | None],
    memory: Threaded,
    add_norm: AddNorm,
) -> tuple[tuple[Float[Array, "b t w"], Float[Array, "b t w"]], Threaded]:
    """Return what `block` does for a stacked layer: the residual stream and its pending addition, float32."""
    assert index.turn is not None
    turn, (x, more) = jnp.asarray(index.turn, jnp.int32), carried
    layer = of_turn(stacked, turn)
    assert stacked.attention_norm is not None and stacked.ffn_norm is not None
    assert layer.gate is not None and layer.up is not None and layer.down is not None

    def added(x: Array, more: Array, weights: Array) -> tuple[Array, Array]:
        rows = (-1, x.shape[-1])
        settings = {"eps": config.norm_eps, "offset": config.norm_offset}
        found, normed = add_norm(x.reshape(rows), more.reshape(rows), weights, turn, **settings)
        return found.reshape(x.shape), normed.reshape(x.shape)

    x, y = added(x, more, stacked.attention_norm)
    softmax, (attend, attend_products) = replace(config.softmax(index.like), sink_logits=layer.sinks), how
    if attend_products is not None and _is_product(layer):
        products = (each.matmul(y) for each in (layer.q, layer.k, layer.v))
        q, k, v = (each.reshape(*each.shape[:2], -1, config.head_dim) for each in products)
        with jax.named_scope("attend"):
            out, memory = attend_products(index, q, k, v, memory, softmax, angles)
    else:
        q, k, v = _projected(layer, config, y, angles)
        with jax.named_scope("attend"):
            out, memory = attend(index, q, k, v, memory, softmax)
    x, y = added(x, layer.o.matmul(out.reshape(*out.shape[:2], -1)), stacked.ffn_norm)
    y = gated(linear(y, layer.gate), linear(y, layer.up), y.dtype, config.activation)
    return (x, layer.down.matmul(y)), memory


def mix_as_trained(config: ExpertConfig, experts: Experts, x: Float[Array, "b t w"]) -> Float[Array, "b t w"]:
    """Return the output of a layer's experts for tokens, by differentiable products."""
    flat = x.reshape(-1, x.shape[-1])
    return mixed(experts, flat, choose(config, gate(experts, flat)), "ragged", config.activation).reshape(x.shape)


@partial(jax.jit, static_argnums=1)  # so that equal layers share the trace
def _before_attention(
    layer: LayerParams,
    config: ModelConfig,
    x: Float[Array, "b t w"],
    angles: Angles,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t k d"], Float[Array, "b t k d"]]:
    return _projected(layer, config, _normed(x, layer.attention_norm, config), angles)


def _projected(
    layer: LayerParams,
    config: ModelConfig,
    y: Float[Array, "b t w"],
    angles: Angles,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t k d"], Float[Array, "b t k d"]]:
    """Return the queries, keys and values of the normed stream."""
    c = config

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
    """Return `x` after a norm, or `x` itself without one."""
    return x if weight is None else rms_norm(x, weight, config.norm_eps, config.norm_offset)


def _added(x: Float[Array, "b t w"], y: Float[Array, "b t w"], config: ModelConfig) -> Float[Array, "b t w"]:
    """Return the residual stream `x` after adding the output of half a layer."""
    if config.residual_scale != 1:
        y = (y.astype(jnp.float32) * config.residual_scale).astype(y.dtype)
    return x + y


def _attended(
    layer: LayerParams, config: ModelConfig, x: Float[Array, "b t w"], out: Float[Array, "b t h d"]
) -> tuple[Float[Array, "b t w"], Float[Array, "b t w"]]:
    """Return the residual stream after attention, and its norm."""
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

"""The training loss: dense causal attention, layers under one scan, cross-entropy in nats per token."""

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.models.config import ModelConfig
from et_jax.models.layers import rms_norm, rope_angles
from et_jax.models.transformer import LayerParams, Params, block
from et_jax.types import replace

HEAD_CHUNK = 512  # rows whose logits are held at a time: 8 MB at 4096 tokens
QUERY_CHUNK = 128  # queries scored at a time; each chunk meets only the keys up to its own end


def causal_attend(
    layer: int, q: Float[Array, "b t h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], memory: Any
) -> tuple[Float[Array, "b t h d"], Any]:
    """Return softmax(q k^T / sqrt(d)) v over each position's past and itself; `memory` passes through.

    Query heads that share a KV head are folded into the rows of one batched product.
    """
    b, t, h, d = q.shape
    kv_heads = k.shape[2]
    chunk = min(QUERY_CHUNK, t)
    keys, values = (jnp.moveaxis(y, 2, 1).reshape(b * kv_heads, t, d) for y in (k, v))
    queries = jnp.moveaxis(q.reshape(b, t, kv_heads, h // kv_heads, d), 1, 3).reshape(b * kv_heads, h // kv_heads, t, d)
    outs = []
    for begin in range(0, t, chunk):
        end = min(begin + chunk, t)
        rows = queries[:, :, begin:end].reshape(b * kv_heads, -1, d)
        scores = jnp.einsum("xqd,xtd->xqt", rows, keys[:, :end], preferred_element_type=jnp.float32) * d**-0.5
        kept = jnp.tile(jnp.arange(begin, end)[:, None] >= jnp.arange(end), (h // kv_heads, 1))
        weights = jax.nn.softmax(jnp.where(kept, scores, -jnp.inf), axis=-1).astype(v.dtype)
        mixed = jnp.einsum("xqt,xtd->xqd", weights, values[:, :end], preferred_element_type=jnp.float32)
        outs.append(mixed.astype(v.dtype).reshape(b, kv_heads, h // kv_heads, end - begin, d))
    out = jnp.concatenate(outs, axis=3)
    return jnp.moveaxis(out, 3, 1).reshape(b, t, h, d), memory


def stack(params: Params) -> Params:
    """Return `params` with its layers as one LayerParams whose leaves lead with the layer axis."""
    return replace(params, layers=(jax.tree.map(lambda *leaves: jnp.stack(leaves), *params.layers),))


def unstack(params: Params, num_layers: int) -> Params:
    """Return stacked `params` with one LayerParams per layer, as `forward` takes them."""
    (layers,) = params.layers
    return replace(params, layers=tuple(jax.tree.map(operator.itemgetter(i), layers) for i in range(num_layers)))


def hidden_states(params: Params, config: ModelConfig, inputs: Int[Array, "b t"]) -> Float[Array, "b t w"]:
    """Return the normed states that the output matrix reads, bfloat16, from stacked `params`."""
    b, t = inputs.shape
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    angles = rope_angles(config, jnp.broadcast_to(jnp.arange(t), (b, t)))

    @jax.checkpoint
    def layer_step(x: Float[Array, "b t w"], layer: LayerParams) -> tuple[Float[Array, "b t w"], None]:
        return block(layer, config, 0, x, angles, causal_attend, None)

    x, _ = jax.lax.scan(layer_step, cast.embedding[inputs], cast.layers[0])
    return rms_norm(x, cast.final_norm, config.norm_eps)


@functools.partial(jax.jit, static_argnames="config")
def token_losses(
    params: Params, config: ModelConfig, inputs: Int[Array, "b t"], targets: Int[Array, "b t"]
) -> Float[Array, "b t"]:
    """Return -log p(target) at every position, nats, float32, from stacked `params`."""
    x = hidden_states(params, config, inputs)
    weight = params.embedding.astype(jnp.bfloat16)
    chunks = _chunks(x.reshape(-1, x.shape[-1]), targets.reshape(-1))
    return jax.lax.map(lambda rows: _losses_and_errors(weight, *rows)[0], chunks).reshape(targets.shape)


def mean_loss(
    params: Params, config: ModelConfig, inputs: Int[Array, "b t"], targets: Int[Array, "b t"]
) -> Float[Array, ""]:
    """Return the mean of `token_losses`, cheap to differentiate."""
    x = hidden_states(params, config, inputs)
    return _cross_entropy(x.reshape(-1, x.shape[-1]), params.embedding, targets.reshape(-1))


@jax.custom_vjp
def _cross_entropy(x: Float[Array, "n w"], weight: Float[Array, "v w"], targets: Int[Array, " n"]) -> Float[Array, ""]:
    """Mean of -log softmax(x weight^T)[target] over the rows."""
    return _cross_entropy_forward(x, weight, targets)[0]


def _cross_entropy_forward(x: Array, weight: Array, targets: Array) -> tuple[Array, tuple[Array, Array]]:
    """The loss and its two gradients in one pass: the logits live for one chunk of rows and are made once."""
    cast = weight.astype(jnp.bfloat16)

    def body(weight_grad: Array, rows: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        losses, errors = _losses_and_errors(cast, *rows)
        errors = errors.astype(jnp.bfloat16)
        weight_grad += jnp.einsum("no,ni->oi", errors, rows[0], preferred_element_type=jnp.float32)
        return weight_grad, (losses, jnp.einsum("no,oi->ni", errors, cast, preferred_element_type=jnp.float32))

    weight_grad, (losses, x_grad) = jax.lax.scan(body, jnp.zeros(weight.shape), _chunks(x, targets))
    x_grad = (x_grad / len(x)).reshape(x.shape).astype(x.dtype)
    return losses.mean(), (x_grad, (weight_grad / len(x)).astype(weight.dtype))


def _cross_entropy_backward(gradients: tuple[Array, Array], upstream: Array) -> tuple[Array, Array, None]:
    x_grad, weight_grad = gradients
    return x_grad * upstream.astype(x_grad.dtype), weight_grad * upstream.astype(weight_grad.dtype), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def _losses_and_errors(weight: Array, x: Array, targets: Array) -> tuple[Array, Array]:
    """-log p(target) of each row, and softmax minus one-hot, its gradient by the logits."""
    scores = jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32)
    log_normaliser = jax.nn.logsumexp(scores, axis=-1)
    losses = log_normaliser - jnp.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
    return losses, jnp.exp(scores - log_normaliser[:, None]) - jax.nn.one_hot(targets, len(weight))


def _chunks(*arrays: Array) -> tuple[Array, ...]:
    rows = math.gcd(len(arrays[0]), HEAD_CHUNK)
    return tuple(array.reshape(-1, rows, *array.shape[1:]) for array in arrays)

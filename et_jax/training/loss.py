"""The training losses: cross-entropy, or divergence from a teacher.

Attention is dense and causal; equal neighbouring layers run in one scan.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.models.config import ModelConfig
from et_jax.models.layers import rms_norm
from et_jax.models.params import LayerParams, Params
from et_jax.models.stacks import OfTurn
from et_jax.models.transformer import angles_of_layers, block, embed
from et_jax.softmax import Softmax
from et_jax.types import replace

HEAD_CHUNK = 512  # rows whose logits exist at a time: 8 MB at 4096 tokens
QUERY_CHUNK = 128  # queries scored at a time; each chunk uses only the keys up to its own end


def causal_attend(
    layer: int,
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    memory: Any,
    softmax: Softmax,
) -> tuple[Float[Array, "b t h d"], Any]:
    """Return softmax(scale q k^T) v over each position's past, or its window, and itself; `memory` passes through.

    `memory` is the segment of every position, "b t", or None if a row is one segment: documents packed
    into a row do not attend to each other. Query heads that share a KV head are folded into the rows of one
    batched product.
    """
    b, t, h, d = q.shape
    kv_heads = k.shape[2]
    chunk = min(QUERY_CHUNK, t)
    keys, values = (jnp.moveaxis(y, 2, 1).reshape(b * kv_heads, t, d) for y in (k, v))
    queries = jnp.moveaxis(q.reshape(b, t, kv_heads, h // kv_heads, d), 1, 3).reshape(b * kv_heads, h // kv_heads, t, d)
    outs = []
    for begin in range(0, t, chunk):
        end = min(begin + chunk, t)
        first = 0 if softmax.window is None else max(0, begin - softmax.window + 1)
        rows = queries[:, :, begin:end].reshape(b * kv_heads, -1, d)
        scores = (
            jnp.einsum("xqd,xtd->xqt", rows, keys[:, first:end], preferred_element_type=jnp.float32) * softmax.scale
        )
        visible = jnp.tile(_seen(memory, first, begin, end, softmax.window), (1, h // kv_heads, 1))
        if memory is not None:
            visible = jnp.repeat(visible, kv_heads, axis=0)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
        mixed = jnp.einsum("xqt,xtd->xqd", weights, values[:, first:end], preferred_element_type=jnp.float32)
        outs.append(mixed.astype(v.dtype).reshape(b, kv_heads, h // kv_heads, end - begin, d))
    out = jnp.concatenate(outs, axis=3)
    return jnp.moveaxis(out, 3, 1).reshape(b, t, h, d), memory


def _seen(
    segments: Int[Array, "b t"] | None, first: int, begin: int, end: int, window: int | None
) -> Bool[Array, "c q k"]:
    """Return which keys from `first` to `end` the queries from `begin` see; `c` is the rows, 1 if all are equal."""
    behind = jnp.arange(begin, end)[:, None] - jnp.arange(first, end)
    past = (behind >= 0) if window is None else (behind >= 0) & (behind < window)
    if segments is None:
        return past[None]
    return past & (segments[:, begin:end, None] == segments[:, None, first:end])


def runs(config: ModelConfig) -> tuple[range, ...]:
    """Return the layers in runs of neighbours with equal windows and rotations."""
    kinds = [(config.softmax(layer), config.rope(layer)) for layer in range(config.num_layers)]
    found = [list(run) for _, run in itertools.groupby(range(config.num_layers), kinds.__getitem__)]
    return tuple(range(run[0], run[-1] + 1) for run in found)


def stack(params: Params, config: ModelConfig) -> Params:
    """Return `params` with the layers of each run as one LayerParams whose leaves lead with the layer axis."""
    layers = [params.layers[run.start : run.stop] for run in runs(config)]
    return replace(params, layers=tuple(jax.tree.map(lambda *leaves: jnp.stack(leaves), *each) for each in layers))


def unstack(params: Params) -> Params:
    """Return stacked `params` with one LayerParams per layer, in the form of `forward`."""
    apart = [
        jax.tree.map(operator.itemgetter(i), layers)
        for layers in params.layers
        for i in range(len(jax.tree.leaves(layers)[0]))
    ]
    return replace(params, layers=tuple(apart))


def hidden_states(
    params: Params, config: ModelConfig, inputs: Int[Array, "b t"], segments: Int[Array, "b t"] | None = None
) -> Float[Array, "b t w"]:
    """Return the normed states that the output matrix reads, bfloat16, from stacked `params`.

    Positions run through a row whatever its segments: rotary attention depends only on differences. Raises ValueError
    for a model with experts or caps, or whose logits are more than a product of these states.
    """
    if not is_plain(config):
        raise ValueError("config: got experts, caps or a divisor of the logits, wanted a model without")
    b, t = inputs.shape
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    angles = angles_of_layers(config, jnp.broadcast_to(jnp.arange(t), (b, t)))

    def layer_step(first: int, x: Array, layer: LayerParams) -> tuple[Array, None]:
        return block(OfTurn(each=(layer,)), config, first, x, angles[first], causal_attend, segments)[0], None

    x = embed(cast, config, inputs)
    for run, layers in zip(runs(config), cast.layers, strict=True):
        x, _ = jax.lax.scan(jax.checkpoint(functools.partial(layer_step, run.start)), x, layers)
    return rms_norm(x, cast.final_norm, config.norm_eps, config.norm_offset)


def is_plain(config: ModelConfig) -> bool:
    """Return whether the loss supports such a model: no experts, cap, sink or divisor."""
    capped = config.score_cap is not None or config.logit_cap is not None
    return config.experts is None and not capped and not config.sinks and config.logit_divisor == 1


@functools.partial(jax.jit, static_argnames="config")
def token_losses(
    params: Params, config: ModelConfig, inputs: Int[Array, "b t"], targets: Int[Array, "b t"]
) -> Float[Array, "b t"]:
    """Return -log p(target) at every position, nats, float32, from stacked `params`."""
    x = hidden_states(params, config, inputs)
    weight = params.embedding.array.astype(jnp.bfloat16)
    chunks = in_chunks(x.reshape(-1, x.shape[-1]), targets.reshape(-1))
    return jax.lax.map(lambda rows: _losses_and_errors(weight, *rows)[0], chunks).reshape(targets.shape)


@functools.partial(jax.jit, static_argnames="config")
def hits(
    params: Params, config: ModelConfig, inputs: Int[Array, "b t"], targets: Int[Array, "b t"]
) -> Bool[Array, "b t"]:
    """Return where the likeliest token is the target, from stacked `params`."""
    x = hidden_states(params, config, inputs)
    weight = params.embedding.array.astype(jnp.bfloat16)

    def body(rows: tuple[Array, Array]) -> Array:
        scores = jnp.einsum("ni,oi->no", rows[0], weight, preferred_element_type=jnp.float32)
        return scores.argmax(axis=-1) == rows[1]

    return jax.lax.map(body, in_chunks(x.reshape(-1, x.shape[-1]), targets.reshape(-1))).reshape(targets.shape)


def mean_loss(
    params: Params,
    config: ModelConfig,
    inputs: Int[Array, "b t"],
    targets: Int[Array, "b t"],
    weights: Float[Array, "b t"] | None = None,
    segments: Int[Array, "b t"] | None = None,
) -> Float[Array, ""]:
    """Return the mean of `token_losses`, weighted by `weights`, with a cheap gradient."""
    x = hidden_states(params, config, inputs, segments)
    rows = (targets.reshape(-1),)
    return _weighed_mean(_losses_and_errors, x, params.embedding.array, rows, (), _counts(inputs, weights))


def mean_divergence(
    params: Params,
    config: ModelConfig,
    inputs: Int[Array, "b t"],
    teacher: Params,
    teacher_config: ModelConfig,
    weights: Float[Array, "b t"] | None = None,
    segments: Int[Array, "b t"] | None = None,
) -> Float[Array, ""]:
    """Return the mean of KL(teacher || model) over all positions, nats, weighted by `weights`.

    Both distributions are at temperature 1 (Hinton et al. 2015; Sanh et al. 2019, without their other terms).
    """
    x = hidden_states(params, config, inputs, segments)
    taught = hidden_states(teacher, teacher_config, inputs, segments)
    rows, others = (taught.reshape(-1, taught.shape[-1]),), (teacher.embedding.array.astype(jnp.bfloat16),)
    return _weighed_mean(_divergences_and_errors, x, params.embedding.array, rows, others, _counts(inputs, weights))


def _counts(inputs: Int[Array, "b t"], weights: Float[Array, "b t"] | None) -> Float[Array, " n"]:
    return jnp.ones(inputs.size) if weights is None else weights.reshape(-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighed_mean(
    judge: Callable[..., tuple[Array, Array]],
    x: Float[Array, "b t w"],
    weight: Float[Array, "v w"],
    rows: tuple[Array, ...],
    others: tuple[Array, ...],
    counts: Float[Array, " n"],
) -> Float[Array, ""]:
    """Return the mean over the rows, weighted by `counts`, of the losses from `judge`, with its errors as gradient.

    `judge` receives the weight, a chunk of `x` and of each of `rows`, and all of `others`.
    """
    return _weighed_mean_forward(judge, x, weight, rows, others, counts)[0]


def _weighed_mean_forward(
    judge: Callable[..., tuple[Array, Array]],
    x: Array,
    weight: Array,
    rows: tuple[Array, ...],
    others: tuple[Array, ...],
    counts: Array,
) -> tuple[Array, tuple[Array, Array, Array]]:
    """Return the loss and its two gradients from one pass: the logits of one chunk of rows exist at a time."""
    cast = weight.astype(jnp.bfloat16)

    def body(weight_grad: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        states, count, *given = chunk
        losses, errors = judge(cast, states, *given, *others)
        errors = (errors * count[:, None]).astype(jnp.bfloat16)
        weight_grad += jnp.einsum("no,ni->oi", errors, states, preferred_element_type=jnp.float32)
        return weight_grad, (losses, jnp.einsum("no,oi->ni", errors, cast, preferred_element_type=jnp.float32))

    chunks = in_chunks(x.reshape(-1, x.shape[-1]), counts, *rows)
    weight_grad, (losses, x_grad) = jax.lax.scan(body, jnp.zeros(weight.shape), chunks)
    total = counts.sum()
    x_grad = (x_grad / total).reshape(x.shape).astype(x.dtype)
    mean = (losses.reshape(-1) * counts).sum() / total
    return mean, (x_grad, (weight_grad / total).astype(weight.dtype), jnp.zeros_like(counts))


def _weighed_mean_backward(
    judge: Callable[..., tuple[Array, Array]], gradients: tuple[Array, Array, Array], upstream: Array
) -> tuple[Array, Array, None, None, Array]:
    x_grad, weight_grad, no_grad = gradients  # targets and counts are not learned
    return x_grad * upstream.astype(x_grad.dtype), weight_grad * upstream.astype(weight_grad.dtype), None, None, no_grad


_weighed_mean.defvjp(_weighed_mean_forward, _weighed_mean_backward)


def _losses_and_errors(weight: Array, x: Array, targets: Array) -> tuple[Array, Array]:
    """Return -log p(target) of each row, and softmax minus one-hot, its gradient with respect to the logits."""
    scores = jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32)
    log_normaliser = jax.nn.logsumexp(scores, axis=-1)
    losses = log_normaliser - jnp.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
    return losses, jnp.exp(scores - log_normaliser[:, None]) - jax.nn.one_hot(targets, len(weight))


def _divergences_and_errors(weight: Array, x: Array, taught: Array, teacher: Array) -> tuple[Array, Array]:
    """Return KL(teacher || model) of each row, and q - p, its gradient with respect to the model's logits."""
    log_p, log_q = log_probabilities(teacher, taught), log_probabilities(weight, x)
    p = jnp.exp(log_p)
    return (p * (log_p - log_q)).sum(axis=-1), jnp.exp(log_q) - p


def log_probabilities(weight: Float[Array, "v w"], x: Float[Array, "n w"]) -> Float[Array, "n v"]:
    """Return the log-softmax of the logits of normed states, float32."""
    return jax.nn.log_softmax(jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32), axis=-1)


def in_chunks(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays with equal numbers of rows, each cut into chunks of at most `HEAD_CHUNK`."""
    rows = math.gcd(len(arrays[0]), HEAD_CHUNK)
    return tuple(array.reshape(-1, rows, *array.shape[1:]) for array in arrays)

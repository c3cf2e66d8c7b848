"""How much depends on each query head of a model, measured on text by gradients; and plain causal attention."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights, forward
from et_jax.softmax import Softmax

_TOGETHER = 16  # tokens that are drawn at a time: of a large vocabulary random numbers take much memory


def causal_attend(
    layer: Any,
    q: Float[Array, "b t h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    memory: Any,
    softmax: Softmax,
) -> tuple[Float[Array, "b t h d"], Any]:
    """Return each token's attention to those before it and itself, or to its window; `memory` passes through."""
    (b, t, h, d), kv_heads = q.shape, k.shape[2]
    grouped = q.reshape(b, t, kv_heads, h // kv_heads, d)
    scores = jnp.einsum("btkgd,bskd->btkgs", grouped, k, preferred_element_type=jnp.float32) * softmax.scale
    before = jnp.arange(t)[:, None] - jnp.arange(t)
    seen = (before >= 0) & (before < (t if softmax.window is None else softmax.window))
    scores = jnp.where(seen[:, None, None], softmax.capped(scores), -jnp.inf).reshape(b, t, h, t)
    log_sum = softmax.with_sinks(jax.nn.logsumexp(scores, axis=-1))
    weights = jnp.exp(scores - log_sum[..., None]).astype(v.dtype).reshape(*grouped.shape[:-1], t)
    return jnp.einsum("btkgs,bskd->btkgd", weights, v).reshape(q.shape), memory


def head_sensitivity(
    config: ModelShape,
    params: ModelWeights,
    tokens: Int[np.ndarray, "r t"],
    start: int,
    draws: int = 4,
    seed: int = 0,
    progress: Callable[[int], None] = lambda rows: None,
) -> Float[np.ndarray, "l k g"]:
    """Return what a squared error of length 1 in a head's output costs, in nats of divergence, on average.

    An error e in the output moves the distributions by e' F e / 2 to second order, F the Fisher information, the mean
    of g g' over tokens drawn from the model's own distributions, g the gradient of their log probability. An error
    in no particular direction costs |e|^2 tr F / 2d. Outputs from token `start` on are counted, and with each all
    later tokens that it reaches; `draws` times as many tokens are drawn. `progress` receives the rows done so far.

    The weights are floats: what is rounded to 8 bits has no gradient. Memory is that of a few arrays of logits of the
    tokens counted in one row.
    """
    length = tokens.shape[1]
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def of_row(params: ModelWeights, row: Int[Array, " t"], key: Array) -> Float[Array, "l h"]:
        def logits(errors: Float[Array, "l t h d"]) -> Float[Array, "n v"]:
            def attend(layer: int, q: Array, k: Array, v: Array, memory: None, softmax: Softmax) -> tuple[Array, None]:
                out, _ = causal_attend(layer, q, k, v, None, softmax)
                return (out.astype(jnp.float32) + errors[layer][None]).astype(out.dtype), memory

            return forward(params, config, row[None], positions, attend, None)[0][0, start:]

        found, back = jax.vjp(logits, jnp.zeros((config.num_layers, length, config.num_heads, config.head_dim)))

        def draw(token: tuple[Array, Float[Array, " v"]]) -> Int[Array, ""]:
            return jax.random.categorical(*token)

        def once(total: Float[Array, "l h"], key: Array) -> tuple[Float[Array, "l h"], None]:
            drawn = jax.lax.map(draw, (jax.random.split(key, len(found)), found), batch_size=_TOGETHER)
            [gradient] = back(jax.nn.one_hot(drawn, found.shape[-1]) - jax.nn.softmax(found))
            return total + jnp.mean(jnp.sum(jnp.square(gradient[:, start:]), axis=-1), axis=1), None

        total = jnp.zeros((config.num_layers, config.num_heads))
        return jax.lax.scan(once, total, jax.random.split(key, draws))[0] / draws

    rows = []
    for row, key in zip(tokens, jax.random.split(jax.random.key(seed), len(tokens)), strict=True):
        rows.append(np.asarray(of_row(params, row, key), np.float64))
        progress(len(rows))
    mean = np.mean(rows, axis=0) / (2 * config.head_dim)
    return mean.reshape(config.num_layers, config.num_kv_heads, config.group_size)

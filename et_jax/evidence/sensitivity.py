"""How much of the next token's distribution depends on each query head: measured by gradients on held-out text."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.evidence.plain_attention import require_plain_attention
from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights, forward
from et_jax.softmax import Softmax


def head_sensitivity(
    config: ModelShape, params: ModelWeights, tokens: Int[np.ndarray, "r t"], start: int, draws: int = 4, seed: int = 0
) -> Float[np.ndarray, "l k g"]:
    """Return what a squared error of length 1 in a head's output costs, in nats of divergence, on average.

    An error e in the output moves the distributions by e' F e / 2 to second order, F the Fisher information, the mean
    of g g' over tokens drawn from the model's own distributions, g the gradient of their log probability. An error
    in no particular direction costs |e|^2 tr F / 2d. Outputs from token `start` on are counted, and with each all
    later tokens that it reaches; `draws` times as many tokens are drawn.

    Raises ValueError for a model with sliding windows, soft caps or sinks.
    """
    require_plain_attention(config)
    length = tokens.shape[1]
    positions, counts = jnp.arange(length, dtype=jnp.int32)[None], jnp.arange(length) >= start

    @jax.jit
    def of_row(row: Int[Array, " t"], key: Array) -> Float[Array, "l h"]:
        def logits(errors: Float[Array, "l t h d"]) -> Float[Array, "t v"]:
            def attend(layer: int, q: Array, k: Array, v: Array, memory: None, softmax: Softmax) -> tuple[Array, None]:
                out = jax.nn.dot_product_attention(q, k, v, scale=softmax.scale, is_causal=True)
                return out + errors[layer][None], memory

            return forward(params, config, row[None], positions, attend, None)[0][0]

        found, back = jax.vjp(logits, jnp.zeros((config.num_layers, length, config.num_heads, config.head_dim)))
        share = jax.nn.softmax(found)

        def once(total: Float[Array, "l h"], key: Array) -> tuple[Float[Array, "l h"], None]:
            drawn = jax.nn.one_hot(jax.random.categorical(key, found), found.shape[-1])
            [gradient] = back(jnp.where(counts[:, None], drawn - share, 0.0))
            squares = jnp.sum(jnp.square(gradient), axis=-1)
            return total + jnp.mean(squares, axis=1, where=counts[:, None]), None

        total = jnp.zeros((config.num_layers, config.num_heads))
        return jax.lax.scan(once, total, jax.random.split(key, draws))[0] / draws

    keys = jax.random.split(jax.random.key(seed), len(tokens))
    mean = np.mean([np.asarray(of_row(row, key), np.float64) for row, key in zip(tokens, keys, strict=True)], axis=0)
    return (mean / (2 * config.head_dim)).reshape(config.num_layers, config.num_kv_heads, config.group_size)

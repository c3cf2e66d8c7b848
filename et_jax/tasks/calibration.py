"""Measuring a model on held-out text: the temperature of its entropies, and how much depends on each query head."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.models.config import ModelConfig, ModelShape
from et_jax.models.model import ModelWeights, forward
from et_jax.softmax import Softmax


def require_plain_attention(config: ModelShape) -> None:
    """Raise ValueError unless each layer's attention is a softmax over all tokens, without a soft cap or sinks."""
    kinds = [config.softmax(layer) for layer in range(config.num_layers)]
    found = {
        "sliding windows": any(one.window is not None for one in kinds),
        "soft caps": any(one.soft_cap is not None for one in kinds),
        "sinks": isinstance(config, ModelConfig) and config.sinks,
    }
    if odd := [name for name, there in found.items() if there]:
        raise ValueError(
            f"config: got {' and '.join(odd)} in attention, wanted no sliding window, soft cap or sink in any layer"
        )


def negative_log_likelihood(
    logits: Float[Array, "n v"], targets: Int[Array, " n"], temperature: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Return the mean of -log softmax(logits / temperature) at `targets`, in nats per token."""
    log_prob = jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_prob, targets[:, None], axis=-1))


def fit_temperature(
    logits: Float[Array, "n v"],
    targets: Int[Array, " n"],
    low: float = 0.05,
    high: float = 20.0,
    max_steps: int = 50,
) -> Float[Array, ""]:
    """Return the T in [low, high] that minimises the negative log-likelihood of held-out targets.

    Above 1 the model was overconfident. The loss is convex in 1 / T, so its only minimum is global; it
    is a bound where targets are always the likeliest token (low) or no likelier than chance (high).
    Measure entropy at this temperature with `moments(logits, T)`. Source: Guo et al. 2017, and
    Entropic-Time Inference, section 5.
    """
    import optax

    optimiser = optax.lbfgs()
    bounds = jnp.log(jnp.float32(low)), jnp.log(jnp.float32(high))

    def loss(x: Float[Array, ""]) -> Float[Array, ""]:
        return negative_log_likelihood(logits, targets, jnp.exp(x))

    def unfinished(carry) -> Array:
        x, _, gradient, step = carry
        outward = ((x <= bounds[0]) & (gradient > 0)) | ((x >= bounds[1]) & (gradient < 0))
        return (step < max_steps) & (jnp.abs(gradient) > 1e-6) & ~outward

    def improve(carry):
        x, state, gradient, step = carry
        change, state = optimiser.update(gradient, state, x, value=loss(x), grad=gradient, value_fn=loss)
        x = jnp.clip(x + change, *bounds)
        return x, state, jax.grad(loss)(x), step + 1

    start = jnp.clip(jnp.float32(0.0), *bounds)
    carry = (start, optimiser.init(start), jax.grad(loss)(start), 0)
    return jnp.clip(jnp.exp(jax.lax.while_loop(unfinished, improve, carry)[0]), low, high)


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

"""The temperature of a model's entropies, fitted to text."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights, forward
from et_jax.models.sensitivity import causal_attend

_TOGETHER = 64  # tokens whose probabilities are in memory at once


def held_out_logits(
    config: ModelShape, params: ModelWeights, tokens: Int[np.ndarray, "r t"]
) -> tuple[Float[Array, "n v"], Int[Array, " n"]]:
    """Return logits and targets of the second half of every row, where the model has context."""
    length = tokens.shape[1] - 1
    positions = jnp.arange(length, dtype=jnp.int32)[None]

    @jax.jit
    def logits(params: ModelWeights, rows: Int[Array, "r s"]) -> Float[Array, "n v"]:
        def of_row(row: Int[Array, " s"]) -> Float[Array, "m v"]:
            return forward(params, config, row[None], positions, causal_attend, None)[0][0, length // 2 :]

        found = jax.lax.map(of_row, rows)
        return found.reshape(-1, found.shape[-1])

    return logits(params, jnp.asarray(tokens[:, :-1])), jnp.asarray(tokens[:, 1 + length // 2 :].reshape(-1))


def negative_log_likelihood(
    logits: Float[Array, "n v"], targets: Int[Array, " n"], temperature: Float[Array, ""] | float
) -> Float[Array, ""]:
    """Return the mean of -log softmax(logits / temperature) at `targets`, in nats per token."""

    @jax.checkpoint
    def of_token(number: Int[Array, ""]) -> Float[Array, ""]:
        return -jax.nn.log_softmax(logits[number].astype(jnp.float32) / temperature)[targets[number]]

    return jnp.mean(jax.lax.map(of_token, jnp.arange(len(targets)), batch_size=_TOGETHER))


def fit_temperature(
    logits: Float[Array, "n v"],
    targets: Int[Array, " n"],
    low: float = 0.05,
    high: float = 20.0,
    max_steps: int = 50,
) -> Float[Array, ""]:
    """Return the T in [low, high] that minimises the negative log-likelihood of held-out targets.

    Above 1 the model was overconfident. The loss is convex in 1 / T, so its only minimum is global; the result
    is a bound if targets are always the likeliest token (low) or no likelier than chance (high).
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

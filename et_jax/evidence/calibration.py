"""The temperature at which a model's probabilities mean what they say on held-out text."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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

"""How warm this very token is drawn: rules, which probe the entropy of the logits at hand.

`state.temperature` is what the laws have set, the request's own where no law moves it; a rule starts
from it and never stores what it returns. A probe costs a pass over the vocabulary.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.base import ControlState, Moments, Signals, TemperatureRule


def newton(
    target_entropy: float,
    num_steps: int = 1,
    gain: float = 1.0,
    least_varentropy: float = 1.0,
    low: float = 0.1,
    high: float = 2.0,
) -> TemperatureRule:
    """`num_steps` damped Newton steps on log T from `state.temperature` towards H(T) = target, in nats.

    x <- x - min(gain, 1 / max(V, least_varentropy)) (H(e^x) - target), clipped; dH/dx = V, the
    varentropy in nats^2. One step costs one probe and may stop short of the target; `solve` does not.
    """

    def rule(moments_at: Moments, signals: Signals, state: ControlState) -> Float[Array, ""]:
        def step(_: Int[Array, ""], x: Float[Array, ""]) -> Float[Array, ""]:
            entropy, varentropy = moments_at(jnp.exp(x))
            damped = jnp.minimum(gain, 1.0 / jnp.maximum(varentropy, least_varentropy))
            return jnp.clip(x - damped * (entropy - target_entropy), jnp.log(low), jnp.log(high))

        x = jnp.log(jnp.clip(state.temperature, low, high))
        return jnp.exp(jax.lax.fori_loop(0, num_steps, step, x))

    return rule


def solve(target_entropy: float, num_steps: int = 16, low: float = 0.1, high: float = 2.0) -> TemperatureRule:
    """The T in [low, high] at which these logits have H(T) = target, in nats; else the bound nearer to it.

    Entropy rises with temperature, so the root is unique. Newton on log T with the varentropy as slope,
    kept in the bracket that the probes so far have left; a step that is not half the last gives way to
    bisection. Each of `num_steps` steps costs a probe.
    """

    def rule(moments_at: Moments, signals: Signals, state: ControlState) -> Float[Array, ""]:
        def step(_: Int[Array, ""], carry):
            x, below, above, last = carry
            entropy, varentropy = moments_at(jnp.exp(x))
            excess = entropy - target_entropy
            below, above = jnp.where(excess <= 0, x, below), jnp.where(excess >= 0, x, above)
            guess = jnp.clip(x - excess / jnp.maximum(varentropy, 1e-6), below, above)
            guess = jnp.where(jnp.abs(guess - x) <= 0.5 * last, guess, 0.5 * (below + above))
            return guess, below, above, jnp.abs(guess - x)

        x = jnp.log(jnp.clip(state.temperature, low, high))
        carry = x, jnp.log(jnp.float32(low)), jnp.log(jnp.float32(high)), jnp.float32(jnp.inf)
        x, *_ = jax.lax.fori_loop(0, num_steps, step, carry)
        return jnp.clip(jnp.exp(x), low, high)

    return rule


def edt(theta: float, base: float = 0.8) -> TemperatureRule:
    """T = T_0 base^(theta / H), T_0 = `state.temperature` and H the raw entropy of these logits, in nats.

    Feed-forward, and the other way round from the thermostat: it warms where the model is unsure and
    goes to 0, greedy, where it is certain. `theta` is in nats; `base` 0.8 is the authors'. Source:
    Zhang et al., EDT, 2024.
    """

    def rule(moments_at: Moments, signals: Signals, state: ControlState) -> Float[Array, ""]:
        entropy, _ = moments_at(jnp.float32(1.0))
        return state.temperature * base ** (theta / jnp.maximum(entropy, jnp.finfo(jnp.float32).tiny))

    return rule


def cool_only(rule: TemperatureRule) -> TemperatureRule:
    """The temperature of `rule`, but never above `state.temperature`.

    Holding entropy at a target heats tokens of which the model is certain; a one-sided rule does not.
    """

    def cooled(moments_at: Moments, signals: Signals, state: ControlState) -> Float[Array, ""]:
        return jnp.minimum(state.temperature, rule(moments_at, signals, state))

    return cooled

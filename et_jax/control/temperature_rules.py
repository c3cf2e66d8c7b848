"""Temperature rules, which set the temperature of the current token and may probe the entropy of its logits.

`state.temperature` is set by the laws, or is the request's own without a law; a rule starts
from it and does not store its result. A probe costs a pass over the vocabulary.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.base import ControlState, MomentsAt, Signals, TemperatureRule, as_value
from et_jax.types import Number, derived, static, value

_FLAT = 1e9  # a temperature at which all tokens are alike


def _set_logs(rule: "Newton | Solve") -> None:
    """Set the bounds of log T."""
    if not 0 < rule.low <= rule.high:
        raise ValueError(f"{type(rule).__name__}: low is {rule.low}; it must be above 0 and at most high = {rule.high}")
    object.__setattr__(rule, "log_low", math.log(rule.low))
    object.__setattr__(rule, "log_high", math.log(rule.high))


@value
class Newton:
    """`num_steps` damped Newton steps on log T from `state.temperature` towards H(T) = target, in nats.

    x <- x - min(gain, 1 / max(V, least_varentropy)) (H(e^x) - target), clipped; dH/dx = V, the
    varentropy in nats^2. One step costs one probe and may stop short of the target; `Solve` does not.
    """

    target_entropy: Number
    num_steps: int = static(default=1)
    gain: Number = 1.0
    least_varentropy: Number = 1.0
    low: Number = 0.1
    high: Number = 2.0
    log_low: Number = derived()
    log_high: Number = derived()

    def __post_init__(self) -> None:
        _set_logs(self)

    def __call__(self, moments_at: MomentsAt, signals: Signals, state: ControlState) -> Float[Array, ""]:
        """Return the temperature after the steps."""

        def step(_: Int[Array, ""], x: Float[Array, ""]) -> Float[Array, ""]:
            entropy, varentropy = moments_at(jnp.exp(x))
            damped = jnp.minimum(self.gain, 1.0 / jnp.maximum(varentropy, self.least_varentropy))
            return jnp.clip(x - damped * (entropy - self.target_entropy), self.log_low, self.log_high)

        x = jnp.log(jnp.clip(state.temperature, self.low, self.high))
        return jnp.exp(jax.lax.fori_loop(0, self.num_steps, step, x))


@value
class Solve:
    """The T in [low, high] at which these logits have H(T) = target, in nats; else the nearer bound.

    Entropy rises with temperature, so the root is unique. Newton on log T with the varentropy as slope,
    clipped to the current bracket; a step longer than half the last is replaced by
    bisection. Each of `num_steps` steps costs a probe.
    """

    target_entropy: Number
    num_steps: int = static(default=16)
    low: Number = 0.1
    high: Number = 2.0
    log_low: Number = derived()
    log_high: Number = derived()

    def __post_init__(self) -> None:
        _set_logs(self)

    def __call__(self, moments_at: MomentsAt, signals: Signals, state: ControlState) -> Float[Array, ""]:
        """Return the root."""

        def step(_: Int[Array, ""], carry):
            x, below, above, last = carry
            entropy, varentropy = moments_at(jnp.exp(x))
            excess = entropy - self.target_entropy
            below, above = jnp.where(excess <= 0, x, below), jnp.where(excess >= 0, x, above)
            guess = jnp.clip(x - excess / jnp.maximum(varentropy, 1e-6), below, above)
            guess = jnp.where(jnp.abs(guess - x) <= 0.5 * last, guess, 0.5 * (below + above))
            return guess, below, above, jnp.abs(guess - x)

        x = jnp.log(jnp.clip(state.temperature, self.low, self.high))
        low, high = (jnp.asarray(end, jnp.float32) for end in (self.log_low, self.log_high))
        carry = x, low, high, jnp.float32(jnp.inf)
        x, *_ = jax.lax.fori_loop(0, self.num_steps, step, carry)
        return jnp.clip(jnp.exp(x), self.low, self.high)


@value
class EDT:
    """T = T_0 base^(theta / H), T_0 = `state.temperature` and H the raw entropy of these logits, in nats.

    Feed-forward, with the opposite sign of the thermostat: it warms if the model is uncertain and
    approaches 0, greedy, if it is certain. `theta` is in nats; `base` 0.8 is the authors'. Source:
    Zhang et al., EDT, 2024.
    """

    theta: Number
    base: Number = 0.8

    def __call__(self, moments_at: MomentsAt, signals: Signals, state: ControlState) -> Float[Array, ""]:
        """Return the temperature for these logits."""
        entropy, _ = moments_at(jnp.float32(1.0))
        return state.temperature * self.base ** (self.theta / jnp.maximum(entropy, jnp.finfo(jnp.float32).tiny))


@value
class Dynamic:
    """T = low + (high - low) (H / log n)^exponent, from low = max(0, T_0 - spread) to high = T_0 + spread.

    T_0 is `state.temperature`, H the raw entropy of these logits and n the number of tokens that may be sampled. A
    greedy request stays greedy. Source: the dynamic temperature of llama.cpp, which names spread `dynatemp-range`.
    """

    spread: Number
    exponent: Number = 1.0

    def __call__(self, moments_at: MomentsAt, signals: Signals, state: ControlState) -> Float[Array, ""]:
        """Return the temperature for these logits."""
        (entropy, _), (greatest, _) = moments_at(jnp.float32(1.0)), moments_at(jnp.float32(_FLAT))
        share = jnp.clip(entropy / jnp.maximum(greatest, jnp.finfo(jnp.float32).tiny), 0.0, 1.0)
        low, high = jnp.maximum(0.0, state.temperature - self.spread), state.temperature + self.spread
        return jnp.where(state.temperature > 0, low + (high - low) * share**self.exponent, 0.0)


@value
class CoolOnly:
    """The temperature of `rule`, but at most `state.temperature`.

    A fixed entropy target heats tokens of which the model is certain; a one-sided rule does not.
    """

    rule: TemperatureRule

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", as_value(self.rule))

    def __call__(self, moments_at: MomentsAt, signals: Signals, state: ControlState) -> Float[Array, ""]:
        """Return the lower of the two temperatures."""
        return jnp.minimum(state.temperature, self.rule(moments_at, signals, state))

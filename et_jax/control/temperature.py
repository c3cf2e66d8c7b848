"""Temperature laws, which set the temperature of the token after the one they measured.

See `temperature_rules.py` for rules, which set the temperature of the token they measure.
"""

import jax.numpy as jnp

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import Number, derived, replace, value


@value
class Fixed(Law):
    """The request's own temperature, unchanged."""

    sets = frozenset()

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Change nothing."""
        return state


@value
class Thermostat(Law):
    """T_{t+1} = clip(T_t exp(-gain (H_T - target)), low, high), H_T the tempered entropy in nats.

    The sign is negative: above the target it cools. With x = log T the slope dH/dx is the varentropy V,
    so the loop contracts while gain * V < 2; the greatest varentropy of any distribution over 128k
    tokens is 35.6 nats^2, so a gain below 0.056 is stable for all logits. It reads only the tempered
    entropy; the raw one remains an independent signal for the clock. If `high` is the request's own temperature
    it only cools. Source: Entropic-Time Inference, section 3.3, equation (1).
    """

    target_entropy: Number
    gain: Number = 0.05
    low: Number = 0.1
    high: Number = 2.0

    sets = frozenset({"temperature"})

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Move the temperature against the error."""
        step = jnp.exp(-self.gain * (signals.tempered_entropy - self.target_entropy))
        return replace(state, temperature=jnp.clip(state.temperature * step, self.low, self.high))


@value
class DampedThermostat(Law):
    """The thermostat with gain min(gain, 1 / max(V_T, least_varentropy)), V_T the tempered varentropy in nats^2.

    A Newton step on log T, which never passes the target by linear prediction, so gain * V <= 1 at every token
    and a large gain does not cause a cycle. `least_varentropy` bounds the step if entropy barely
    depends on temperature.
    """

    target_entropy: Number
    gain: Number = 1.0
    least_varentropy: Number = 1.0
    low: Number = 0.1
    high: Number = 2.0

    sets = frozenset({"temperature"})

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Move the temperature against the error."""
        damped = jnp.minimum(self.gain, 1.0 / jnp.maximum(signals.tempered_varentropy, self.least_varentropy))
        step = jnp.exp(-damped * (signals.tempered_entropy - self.target_entropy))
        return replace(state, temperature=jnp.clip(state.temperature * step, self.low, self.high))


@value
class Mirostat2(Law):
    """Mirostat's second version: cap_{t+1} = cap_t - rate (S_t - target), S_t the raw surprisal in nats.

    Tokens whose surprisal exceeds the cap are not sampled; the cap starts at twice the target. As printed
    nothing bounds the cap, and while even the likeliest token has a greater surprisal than the target it falls
    below zero; wrap it in `guards.Clipped` to bound it. `rate` is dimensionless and 0.1 the
    authors' value; their target of 5 bits is 3.47 nats. Source: Basu et al., Mirostat, ICLR 2021.
    """

    target_surprisal: Number
    rate: Number = 0.1
    first_cap: Number = derived()

    sets = frozenset({"surprisal_cap"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_cap", 2.0 * self.target_surprisal)

    def init(self, state: ControlState) -> ControlState:
        """Start the cap."""
        return replace(state, surprisal_cap=jnp.full_like(state.surprisal_cap, self.first_cap))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Move the cap against the error."""
        error = signals.surprisal - self.target_surprisal
        return replace(state, surprisal_cap=state.surprisal_cap - self.rate * error)

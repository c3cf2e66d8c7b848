"""How warm the next token is drawn."""

import jax.numpy as jnp

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import replace


def fixed() -> Law:
    """The request's own temperature, unchanged."""
    return Law(lambda signals, state: state)


def thermostat(target_entropy: float, gain: float = 0.05, low: float = 0.1, high: float = 2.0) -> Law:
    """T_{t+1} = clip(T_t exp(-gain (H_T - target)), low, high), H_T the tempered entropy in nats.

    The sign is negative: above the target it cools. With x = log T the slope dH/dx is the varentropy V,
    so the loop contracts while gain * V < 2; the greatest varentropy of any distribution over 128k
    tokens is 35.6 nats^2, so a gain below 0.056 is stable for all logits. It feeds on the tempered
    entropy alone: the raw one stays free to drive the clock. Source: Entropic-Time Inference, section
    3.3, equation (1).
    """

    def update(signals: Signals, state: ControlState) -> ControlState:
        step = jnp.exp(-gain * (signals.tempered_entropy - target_entropy))
        return replace(state, temperature=jnp.clip(state.temperature * step, low, high))

    return Law(update)

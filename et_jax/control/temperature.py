"""How warm the next token is drawn: laws, which act on the token after the one they measured.

See `temperature_rules.py` for rules, which act on the very token they measure.
"""

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
    entropy alone: the raw one stays free to drive the clock. With `high` the request's own temperature
    it only ever cools. Source: Entropic-Time Inference, section 3.3, equation (1).
    """

    def update(signals: Signals, state: ControlState) -> ControlState:
        step = jnp.exp(-gain * (signals.tempered_entropy - target_entropy))
        return replace(state, temperature=jnp.clip(state.temperature * step, low, high))

    return Law(update)


def damped_thermostat(
    target_entropy: float, gain: float = 1.0, least_varentropy: float = 1.0, low: float = 0.1, high: float = 2.0
) -> Law:
    """The thermostat with gain min(gain, 1 / max(V_T, least_varentropy)), V_T the tempered varentropy in nats^2.

    A Newton step on log T, never past the target by linear prediction, so gain * V <= 1 at every token
    and a large gain does not make it cycle. `least_varentropy` bounds the step where entropy barely
    answers to temperature.
    """

    def update(signals: Signals, state: ControlState) -> ControlState:
        damped = jnp.minimum(gain, 1.0 / jnp.maximum(signals.tempered_varentropy, least_varentropy))
        step = jnp.exp(-damped * (signals.tempered_entropy - target_entropy))
        return replace(state, temperature=jnp.clip(state.temperature * step, low, high))

    return Law(update)


def mirostat2(target_surprisal: float, rate: float = 0.1) -> Law:
    """Mirostat's second version: cap_{t+1} = cap_t - rate (S_t - target), S_t the raw surprisal in nats.

    Tokens whose surprisal exceeds the cap are not drawn; the cap starts at twice the target. As printed
    nothing bounds the cap, and while even the likeliest token surprises more than the target it falls
    below zero; wrap it in `guards.clipped` to keep it within reach. `rate` is a pure number and 0.1 the
    authors' value; their target of 5 bits is 3.47 nats. Source: Basu et al., Mirostat, ICLR 2021.
    """

    def init(state: ControlState) -> ControlState:
        return replace(state, surprisal_cap=jnp.full_like(state.surprisal_cap, 2.0 * target_surprisal))

    def update(signals: Signals, state: ControlState) -> ControlState:
        return replace(state, surprisal_cap=state.surprisal_cap - rate * (signals.surprisal - target_surprisal))

    return Law(update, init)

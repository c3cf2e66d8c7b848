"""Clocks: how much entropic time a token is worth."""

import jax.numpy as jnp

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import replace


def paper() -> Law:
    """Entropic time as printed: the sum of the falls max(0, H_{t-1} - H_t) of the raw entropy, in nats.

    The first token resolves nothing. Mostly counts jitter: the sum is half of total variation plus
    H_0 - H_n. Source: Entropic-Time Inference, section 2.
    """

    def init(state: ControlState) -> ControlState:
        notes = {"previous_entropy": jnp.zeros_like(state.entropic_time)}
        return replace(state, memory=state.memory | {"clock": notes})

    def update(signals: Signals, state: ControlState) -> ControlState:
        fall = jnp.maximum(0.0, state.memory["clock"]["previous_entropy"] - signals.entropy)
        notes = {"previous_entropy": signals.entropy}
        return replace(state, entropic_time=state.entropic_time + fall, memory=state.memory | {"clock": notes})

    return Law(update, init)

"""Filters on what a law sees."""

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import replace


def ema_entropy(decay: float = 0.9) -> Law:
    """Entropy, filtered: e_t = decay * e_{t-1} + (1 - decay) * H_t, in nats, starting at the first H."""

    def update(signals: Signals, state: ControlState) -> ControlState:
        first = (signals.generated <= 1).astype(state.entropy.dtype)
        keep = decay * (1.0 - first)
        return replace(state, entropy=keep * state.entropy + (1.0 - keep) * signals.entropy)

    return Law(update)

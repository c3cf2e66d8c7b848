"""Filters on the signals that a law reads."""

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import Number, replace, value


@value
class EmaEntropy(Law):
    """Entropy, filtered: e_t = decay * e_{t-1} + (1 - decay) * H_t, in nats, starting at the first H."""

    decay: Number = 0.9

    sets = frozenset({"entropy"})

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Filter the raw entropy."""
        first = (signals.generated <= 1).astype(state.entropy.dtype)
        keep = self.decay * (1.0 - first)
        return replace(state, entropy=keep * state.entropy + (1.0 - keep) * signals.entropy)

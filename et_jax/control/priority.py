"""Who is served next when more sequences are resident than a step serves."""

from jaxtyping import Array, Float

from et_jax.control.base import ControlState, PriorityRule, Signals


def fcfs() -> PriorityRule:
    """First come, first served: the negated arrival number."""

    def priority(signals: Signals, state: ControlState) -> Float[Array, ""]:
        return -signals.arrival.astype(state.priority.dtype)

    return priority

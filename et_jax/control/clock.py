"""Clocks: how much entropic time a token is worth. Each reads the raw entropy, never the tempered one."""

import jax.numpy as jnp

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import replace


def paper() -> Law:
    """Entropic time as printed: the sum of the falls max(0, H_{t-1} - H_t) of the raw entropy, in nats.

    The first token resolves nothing. Mostly counts jitter: the sum is half of total variation plus
    H_0 - H_n. Source: Entropic-Time Inference, section 2.
    """
    return _falls(0.0)


def deadband(noise: float) -> Law:
    """The sum of the falls beyond what an estimator's error explains: max(0, H_{t-1} - H_t - 2 noise), in nats.

    `noise` bounds |estimate - H|, in nats, so that an entropy which only seems to move adds nothing.
    """
    return _falls(2.0 * noise)


def _falls(dead: float) -> Law:
    def init(state: ControlState) -> ControlState:
        notes = {"previous_entropy": jnp.zeros_like(state.entropic_time)}
        return replace(state, notes=state.notes | {"clock": notes})

    def update(signals: Signals, state: ControlState) -> ControlState:
        fall = jnp.maximum(0.0, state.notes["clock"]["previous_entropy"] - signals.entropy - dead)
        notes = {"previous_entropy": signals.entropy}
        return replace(state, entropic_time=state.entropic_time + fall, notes=state.notes | {"clock": notes})

    return Law(update, init)


def record() -> Law:
    """H_0 - min_s H_s: how far below its first value the raw entropy has ever been, in nats.

    Never more than log V, whatever the jitter: time passes only when a new low is reached.
    """

    def init(state: ControlState) -> ControlState:
        notes = {"least_entropy": jnp.full_like(state.entropic_time, jnp.inf)}
        return replace(state, notes=state.notes | {"clock": notes})

    def update(signals: Signals, state: ControlState) -> ControlState:
        least = state.notes["clock"]["least_entropy"]
        fall = jnp.where(jnp.isinf(least), 0.0, jnp.maximum(0.0, least - signals.entropy))
        notes = {"least_entropy": jnp.minimum(least, signals.entropy)}
        return replace(state, entropic_time=state.entropic_time + fall, notes=state.notes | {"clock": notes})

    return Law(update, init)


def chain_rule(realised: bool = False) -> Law:
    """The sum of H_t, the uncertainty each token resolves when it is drawn, in nats.

    By the chain rule of entropy it is the uncertainty of the text itself, where the paper's differences
    compare entropies of different variables. `realised` sums the surprisals -log p(x_t) of the tokens
    drawn instead of their expectation.
    """

    def update(signals: Signals, state: ControlState) -> ControlState:
        resolved = signals.surprisal if realised else signals.entropy
        return replace(state, entropic_time=state.entropic_time + resolved)

    return Law(update)


def beside(clock: Law, name: str) -> Law:
    """The same clock, its time and notes kept in `notes[name]`: a second reading that drives nothing."""

    def init(state: ControlState) -> ControlState:
        own = clock.init(replace(state, entropic_time=jnp.zeros_like(state.entropic_time), notes={}))
        notes = {"entropic_time": own.entropic_time, "notes": own.notes}
        return replace(state, notes=state.notes | {name: notes})

    def update(signals: Signals, state: ControlState) -> ControlState:
        notes = state.notes[name]
        own = clock.update(signals, replace(state, entropic_time=notes["entropic_time"], notes=notes["notes"]))
        notes = {"entropic_time": own.entropic_time, "notes": own.notes}
        return replace(state, notes=state.notes | {name: notes})

    return Law(update, init)

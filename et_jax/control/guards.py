"""Guards: wrappers that keep a law in bounds, or count how often it leaves them.

Each wraps one law and is left out to reproduce a paper as printed. `field` names the field of
`ControlState` that the law decides.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from et_jax.control.base import AnyLaw, ControlState, Law, Signals, chain
from et_jax.types import replace

_COUNTS = frozenset({"events", "tokens"})


def clipped(law: AnyLaw, field: str, low: float, high: float) -> Law:
    """The law with what it decides kept in [low, high], in the units of `field`, from the start.

    The clipped value is what the law sees next, so an integrator does not wind up.
    """
    inner = chain(law)

    def clip(state: ControlState) -> ControlState:
        return replace(state, **{field: jnp.clip(getattr(state, field), low, high)})

    return Law(lambda signals, state: clip(inner.update(signals, state)), lambda state: clip(inner.init(state)))


def never_above_start(law: AnyLaw, field: str) -> Law:
    """The law with `field` never above what the sequence started with: a temperature law then only cools.

    Holding entropy at a target heats tokens of which the model is certain; a one-sided law does not. The
    start is kept in `notes[field + "_start"]`.
    """
    inner, name = chain(law), field + "_start"

    def init(state: ControlState) -> ControlState:
        started = inner.init(state)
        return replace(started, notes=started.notes | {name: getattr(started, field)})

    def update(signals: Signals, state: ControlState) -> ControlState:
        decided = inner.update(signals, state)
        return replace(decided, **{field: jnp.minimum(getattr(decided, field), decided.notes[name])})

    return Law(update, init)


def rate_limited(law: AnyLaw, field: str, rise: float, fall: float = jnp.inf) -> Law:
    """The law with `field` rising by at most `rise` and falling by at most `fall` a token, in its own units.

    Source: Entropic-Time Inference, section 5, bounded rate of change of thresholds and temperatures.
    """
    inner = chain(law)

    def update(signals: Signals, state: ControlState) -> ControlState:
        old, decided = getattr(state, field), inner.update(signals, state)
        return replace(decided, **{field: jnp.clip(getattr(decided, field), old - fall, old + rise)})

    return Law(update, inner.init)


def floored(law: AnyLaw, floor: float) -> Law:
    """The law shown raw entropies of at least `floor` nats: H~ = max(H^, H_min).

    Keeps an entropy that is underestimated from looking like certainty. Source: Entropic-Time Inference,
    section 3.3.
    """
    inner = chain(law)

    def update(signals: Signals, state: ControlState) -> ControlState:
        raised = {
            name: jnp.maximum(getattr(signals, name), floor) for name in ("entropy", "entropy_low", "entropy_high")
        }
        return inner.update(replace(signals, **raised), state)

    return Law(update, inner.init)


def saturation(law: AnyLaw, field: str, low: float, high: float) -> Law:
    """The law, with the tokens counted after which `field` stands at `low` or `high` (see `rate`).

    A thermostat whose target no temperature in its range can reach sits at a bound: its share of
    tokens says that the target, not the gain, is wrong. Notes: `notes[field + "_saturation"]`.
    """
    inner = chain(law)

    def stuck(_: Signals, state: ControlState) -> Bool[Array, "*b"]:
        value = getattr(state, field)
        return (value <= low) | (value >= high)

    return _counted(inner, field + "_saturation", stuck)


def stability(law: AnyLaw, gain: float) -> Law:
    """The law, with the tokens counted at which gain * V >= 2, V the tempered varentropy in nats^2 (see `rate`).

    There the thermostat overshoots by more than it was off, and may cycle. Notes: `notes["stability"]`.
    """

    def overshoots(signals: Signals, _: ControlState) -> Bool[Array, "*b"]:
        return gain * signals.tempered_varentropy >= 2.0

    return _counted(chain(law), "stability", overshoots)


def _counted(law: Law, name: str, event) -> Law:
    def init(state: ControlState) -> ControlState:
        state = law.init(state)
        zero = jnp.zeros(state.temperature.shape, jnp.int32)
        return replace(state, notes=state.notes | {name: dict.fromkeys(_COUNTS, zero)})

    def update(signals: Signals, state: ControlState) -> ControlState:
        state = law.update(signals, state)
        old = state.notes[name]
        happened = event(signals, state).astype(jnp.int32)
        notes = {"events": old["events"] + happened, "tokens": old["tokens"] + 1}
        return replace(state, notes=state.notes | {name: notes})

    return Law(update, init)


def rate(state: ControlState, name: str) -> Float[Array, "*b"]:
    """Return the share of tokens flagged by the counting guard whose notes are `notes[name]`, 0 before the first."""
    notes = state.notes[name]
    return notes["events"].astype(jnp.float32) / jnp.maximum(notes["tokens"], 1).astype(jnp.float32)


def rates(state: ControlState) -> dict[str, Float[Array, "*b"]]:
    """Return `rate` of every counting guard in the chain, by name."""
    counted = [name for name, notes in state.notes.items() if isinstance(notes, dict) and set(notes) == _COUNTS]
    return {name: rate(state, name) for name in counted}

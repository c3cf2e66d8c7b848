"""Guards: wrappers that keep a law in bounds, or count how often it leaves them.

Each wraps one law and is left out to reproduce a paper as printed. `field` names the field of
`ControlState` that the law decides.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import AnyLaw, ControlState, Law, Signals, as_value, claim, with_record, started, updated
from et_jax.types import Number, pytree, replace, static, value

_NUMBERS = ("entropy", "entropic_time", "total_cost", "temperature", "surprisal_cap", "tolerance", "priority")


class _Guard(Law):
    """A law around another, `law`, which may be a plain function."""

    law: AnyLaw

    def __post_init__(self) -> None:
        object.__setattr__(self, "law", as_value(self.law))
        field = getattr(self, "field", _NUMBERS[0])
        if field not in _NUMBERS:
            raise ValueError(f"{type(self).__name__}: field is {field!r}; it must be one of {', '.join(_NUMBERS)}")

    def init(self, state: ControlState) -> ControlState:
        """Start the law within."""
        return started(self.law, state)


def _sets_of_law(guard: _Guard) -> frozenset[str] | None:
    """What the law within sets."""
    return as_value(guard.law).sets


def _sets_field_too(guard: Any) -> frozenset[str] | None:
    """What the law within sets, and the field that is guarded."""
    within = _sets_of_law(guard)
    return None if within is None else within | {guard.field}


@value
class Clipped(_Guard):
    """The law with what it decides kept in [low, high], in the units of `field`, from the start.

    The clipped value is what the law sees next, so an integrator does not wind up.
    """

    law: AnyLaw
    field: str = static()
    low: Number
    high: Number

    sets = property(_sets_field_too)

    def init(self, state: ControlState) -> ControlState:
        """Start the law within bounds."""
        return self._clip(started(self.law, state))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Keep what the law decides in bounds."""
        return self._clip(updated(self.law, signals, state))

    def _clip(self, state: ControlState) -> ControlState:
        return replace(state, **{self.field: jnp.clip(getattr(state, self.field), self.low, self.high)})


@value
class NeverAboveStart(_Guard):
    """The law with `field` never above what the sequence started with: a temperature law then only cools.

    Holding entropy at a target heats tokens of which the model is certain; a one-sided law does not. The
    start is kept in the record `field + "_start"`.
    """

    law: AnyLaw
    field: str = static()

    sets = property(_sets_field_too)

    def init(self, state: ControlState) -> ControlState:
        """Note the start."""
        state = started(self.law, state)
        return claim(self, state, self._record, getattr(state, self.field))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Keep what the law decides at or below the start."""
        decided = updated(self.law, signals, state)
        return replace(decided, **{self.field: jnp.minimum(getattr(decided, self.field), decided.records[self._record])})

    @property
    def _record(self) -> str:
        return self.field + "_start"


@value
class RateLimited(_Guard):
    """The law with `field` rising by at most `rise` and falling by at most `fall` a token, in its own units.

    Source: Entropic-Time Inference, section 5, bounded rate of change of thresholds and temperatures.
    """

    law: AnyLaw
    field: str = static()
    rise: Number
    fall: Number = jnp.inf

    sets = property(_sets_field_too)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Keep what the law decides near what was."""
        old, decided = getattr(state, self.field), updated(self.law, signals, state)
        limited = jnp.clip(getattr(decided, self.field), old - self.fall, old + self.rise)
        return replace(decided, **{self.field: limited})


@value
class Floored(_Guard):
    """The law shown raw entropies of at least `floor` nats: H~ = max(H^, H_min).

    Keeps an entropy that is underestimated from looking like certainty. Source: Entropic-Time Inference,
    section 3.3.
    """

    law: AnyLaw
    floor: Number

    sets = property(_sets_of_law)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Let the law decide by raised entropies."""
        names = ("entropy", "entropy_low", "entropy_high")
        raised = {name: jnp.maximum(getattr(signals, name), self.floor) for name in names}
        return updated(self.law, replace(signals, **raised), state)


@pytree
class CountRecord:
    """How many tokens a counting guard has flagged, and how many it has seen."""

    events: Int[Array, "*b"]
    tokens: Int[Array, "*b"]


class _Counting(_Guard):
    """A guard that changes nothing and counts the tokens after which `_happened` holds."""

    _record: str

    sets = property(_sets_of_law)

    def init(self, state: ControlState) -> ControlState:
        """Start counting."""
        state = started(self.law, state)
        zero = jnp.zeros(state.temperature.shape, jnp.int32)
        return claim(self, state, self._record, CountRecord(events=zero, tokens=zero))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Count the token."""
        state = updated(self.law, signals, state)
        old = state.records[self._record]
        happened = self._happened(signals, state).astype(jnp.int32)
        return with_record(state, self._record, CountRecord(events=old.events + happened, tokens=old.tokens + 1))

    def _happened(self, signals: Signals, state: ControlState) -> Bool[Array, "*b"]:
        raise NotImplementedError


@value
class Saturation(_Counting):
    """The law, with the tokens counted after which `field` stands at `low` or `high` (see `rate`).

    A thermostat whose target no temperature in its range can reach sits at a bound: its share of
    tokens says that the target, not the gain, is wrong. The record is `field + "_saturation"`.
    """

    law: AnyLaw
    field: str = static()
    low: Number
    high: Number

    @property
    def _record(self) -> str:
        return self.field + "_saturation"

    def _happened(self, signals: Signals, state: ControlState) -> Bool[Array, "*b"]:
        decided = getattr(state, self.field)
        return (decided <= self.low) | (decided >= self.high)


@value
class Stability(_Counting):
    """The law, with the tokens counted at which gain * V >= 2, V the tempered varentropy in nats^2 (see `rate`).

    There the thermostat overshoots by more than it was off, and may cycle. The record is "stability".
    """

    law: AnyLaw
    gain: Number

    @property
    def _record(self) -> str:
        return "stability"

    def _happened(self, signals: Signals, state: ControlState) -> Bool[Array, "*b"]:
        return self.gain * signals.tempered_varentropy >= 2.0


def rate(state: ControlState, name: str) -> Float[Array, "*b"]:
    """Return the share of tokens flagged by the counting guard whose record is `name`, 0 before the first."""
    record = state.records[name]
    return record.events.astype(jnp.float32) / jnp.maximum(record.tokens, 1).astype(jnp.float32)


def rates(state: ControlState) -> dict[str, Float[Array, "*b"]]:
    """Return `rate` of every counting guard in the chain, by name."""
    return {name: rate(state, name) for name, record in state.records.items() if isinstance(record, CountRecord)}

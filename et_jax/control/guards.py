"""Guards: wrappers that clip or limit what a law sets, or count how often it reaches its bounds.

Each wraps one law; omit it to reproduce a paper as printed. `field` names the field of
`ControlState` that the law sets.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import AnyLaw, ControlState, Law, Signals, as_value, claim, started, updated, with_record
from et_jax.types import Number, pytree, replace, static, value

_NUMBERS = ("entropy", "entropic_time", "total_cost", "temperature", "surprisal_cap", "tolerance", "priority")


class _Guard(Law):
    """A law that wraps another, `law`, which may be a plain function."""

    law: AnyLaw

    def __post_init__(self) -> None:
        object.__setattr__(self, "law", as_value(self.law))
        field = getattr(self, "field", _NUMBERS[0])
        if field not in _NUMBERS:
            raise ValueError(f"{type(self).__name__}: field is {field!r}; it must be one of {', '.join(_NUMBERS)}")

    def init(self, state: ControlState) -> ControlState:
        """Run the init of the wrapped law."""
        return started(self.law, state)


def _sets_of_law(guard: _Guard) -> frozenset[str] | None:
    """Return the fields that the wrapped law sets."""
    return as_value(guard.law).sets


def _sets_field_too(guard: Any) -> frozenset[str] | None:
    """Return the fields that the wrapped law sets, and the guarded field."""
    within = _sets_of_law(guard)
    return None if within is None else within | {guard.field}


@value
class Clipped(_Guard):
    """The law with `field` clipped to [low, high], in the field's units, from the start.

    The law reads the clipped value next, so an integrator does not wind up.
    """

    law: AnyLaw
    field: str = static()
    low: Number
    high: Number

    sets = property(_sets_field_too)

    def init(self, state: ControlState) -> ControlState:
        """Run the init of the wrapped law, clipped."""
        return self._clip(started(self.law, state))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Run the wrapped law and clip its field."""
        return self._clip(updated(self.law, signals, state))

    def _clip(self, state: ControlState) -> ControlState:
        return replace(state, **{self.field: jnp.clip(getattr(state, self.field), self.low, self.high)})


@value
class NeverAboveStart(_Guard):
    """The law with `field` never above its starting value: a temperature law then only cools.

    A fixed entropy target heats tokens of which the model is certain; a one-sided law does not. The
    starting value is stored in the record `field + "_start"`.
    """

    law: AnyLaw
    field: str = static()

    sets = property(_sets_field_too)

    def init(self, state: ControlState) -> ControlState:
        """Record the starting value."""
        state = started(self.law, state)
        return claim(self, state, self._name, getattr(state, self.field))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Clip what the law sets at the starting value."""
        decided = updated(self.law, signals, state)
        return replace(decided, **{self.field: jnp.minimum(getattr(decided, self.field), decided.records[self._name])})

    @property
    def _name(self) -> str:
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
        """Limit the change of the field."""
        old, decided = getattr(state, self.field), updated(self.law, signals, state)
        limited = jnp.clip(getattr(decided, self.field), old - self.fall, old + self.rise)
        return replace(decided, **{self.field: limited})


@value
class Floored(_Guard):
    """The law with raw entropies of at least `floor` nats: H~ = max(H^, H_min).

    Keeps an underestimated entropy from passing for certainty. Source: Entropic-Time Inference,
    section 3.3.
    """

    law: AnyLaw
    floor: Number

    sets = property(_sets_of_law)

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Run the law on the raised entropies."""
        names = ("entropy", "entropy_low", "entropy_high")
        raised = {name: jnp.maximum(getattr(signals, name), self.floor) for name in names}
        return updated(self.law, replace(signals, **raised), state)


@pytree
class CountRecord:
    """The tokens that a counting guard has flagged, and all tokens it has counted."""

    events: Int[Array, "*b"]
    tokens: Int[Array, "*b"]


class _Counting(_Guard):
    """A guard that changes nothing and counts the tokens for which `_happened` is true."""

    _name: str

    sets = property(_sets_of_law)

    def init(self, state: ControlState) -> ControlState:
        """Start both counts at 0."""
        state = started(self.law, state)
        zero = jnp.zeros(state.temperature.shape, jnp.int32)
        return claim(self, state, self._name, CountRecord(events=zero, tokens=zero))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Count the token."""
        state = updated(self.law, signals, state)
        old = state.records[self._name]
        happened = self._happened(signals, state).astype(jnp.int32)
        return with_record(state, self._name, CountRecord(events=old.events + happened, tokens=old.tokens + 1))

    def _happened(self, signals: Signals, state: ControlState) -> Bool[Array, "*b"]:
        raise NotImplementedError


@value
class Saturation(_Counting):
    """The law; counts the tokens after which `field` is at `low` or `high` (see `rate`).

    A thermostat whose target no temperature in its range can reach stays at a bound: a high share of
    tokens shows that the target, not the gain, is wrong. The record is `field + "_saturation"`.
    """

    law: AnyLaw
    field: str = static()
    low: Number
    high: Number

    @property
    def _name(self) -> str:
        return self.field + "_saturation"

    def _happened(self, signals: Signals, state: ControlState) -> Bool[Array, "*b"]:
        decided = getattr(state, self.field)
        return (decided <= self.low) | (decided >= self.high)


@value
class Stability(_Counting):
    """The law; counts the tokens at which gain * V >= 2, V the tempered varentropy in nats^2 (see `rate`).

    There the thermostat overshoots by more than its error, and may cycle. The record is "stability".
    """

    law: AnyLaw
    gain: Number

    @property
    def _name(self) -> str:
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

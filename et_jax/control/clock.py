"""Clocks: how much entropic time a token adds. Each reads the raw entropy, never the tempered one."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.control.base import ControlState, Law, Signals, claim, started, updated, with_record
from et_jax.types import Number, derived, pytree, replace, static, value

_RECORD = "clock"  # one clock drives a sequence


@pytree
class EntropyRecord:
    """The last raw entropy, in nats, which the next one is compared with."""

    entropy: Float[Array, "*b"]


@value
class FallClock(Law):
    """Entropic time as printed: the sum of the falls max(0, H_{t-1} - H_t) of the raw entropy, in nats.

    The first token adds nothing. The sum is mostly jitter: half of the total variation plus
    H_0 - H_n. With `noise`, a bound on |estimate - H| in nats, only the part of a fall above 2 noise counts, so
    that estimation error adds nothing. Source: Entropic-Time Inference, section 2.
    """

    noise: Number = 0.0
    deadband: Number = derived()

    sets = frozenset({"entropic_time"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadband", 2.0 * self.noise)

    def init(self, state: ControlState) -> ControlState:
        """Record an entropy from which no fall is possible."""
        return claim(self, state, _RECORD, EntropyRecord(entropy=jnp.zeros_like(state.entropic_time)))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Add the fall."""
        fall = jnp.maximum(0.0, state.records[_RECORD].entropy - signals.entropy - self.deadband)
        state = replace(state, entropic_time=state.entropic_time + fall)
        return with_record(state, _RECORD, EntropyRecord(entropy=signals.entropy))


@value
class RecordClock(Law):
    """H_0 - min_s H_s: the fall of the raw entropy from its first value to its minimum so far, in nats.

    At most log V, whatever the jitter: time advances only at a new minimum.
    """

    sets = frozenset({"entropic_time"})

    def init(self, state: ControlState) -> ControlState:
        """Record that there is no minimum yet."""
        return claim(self, state, _RECORD, EntropyRecord(entropy=jnp.full_like(state.entropic_time, jnp.inf)))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Add the fall below the minimum so far."""
        least = state.records[_RECORD].entropy
        fall = jnp.where(jnp.isinf(least), 0.0, jnp.maximum(0.0, least - signals.entropy))
        state = replace(state, entropic_time=state.entropic_time + fall)
        return with_record(state, _RECORD, EntropyRecord(entropy=jnp.minimum(least, signals.entropy)))


@value
class ChainRuleClock(Law):
    """The sum of H_t, the uncertainty each token resolves when it is sampled, in nats.

    By the chain rule of entropy it is the uncertainty of the sequence itself; the paper's differences
    compare entropies of different variables. `realised` sums the surprisals -log p(x_t) of the sampled
    tokens instead of their expectation.
    """

    realised: bool = static(default=False)

    sets = frozenset({"entropic_time"})

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Add the entropy or the surprisal of the token."""
        resolved = signals.surprisal if self.realised else signals.entropy
        return replace(state, entropic_time=state.entropic_time + resolved)


@pytree
class BesideRecord:
    """The time of a second clock, in nats, and its records."""

    entropic_time: Float[Array, "*b"]
    records: dict


@value
class Beside(Law):
    """A second clock whose time and records are stored in the record `name`; no other law reads it."""

    clock: Law
    name: str = static()

    sets = frozenset()

    def init(self, state: ControlState) -> ControlState:
        """Start the second clock at 0."""
        own = replace(state, entropic_time=jnp.zeros_like(state.entropic_time), records={})
        own = started(self.clock, own)
        return claim(self, state, self.name, BesideRecord(entropic_time=own.entropic_time, records=own.records))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Update the second clock."""
        record = state.records[self.name]
        own = updated(self.clock, signals, replace(state, entropic_time=record.entropic_time, records=record.records))
        return with_record(state, self.name, BesideRecord(entropic_time=own.entropic_time, records=own.records))

"""Which sequences are served next when more sequences are resident than a step serves.

A priority rule scores one sequence; the step serves the highest scores. The printed rules can starve a
sequence for ever: `Aged` wraps any of them so that it cannot, for `waiting_bound` steps at most.
"""

import math

import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from et_jax.control.base import ControlState, Law, PriorityRule, Signals, as_value, claim, with_record
from et_jax.types import Number, derived, pytree, value

_DRIFT = "entropy_drift"


@value
class FCFS:
    """First come, first served: the negated arrival number."""

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        return -signals.arrival.astype(state.priority.dtype)


@value
class SRPT:
    """Shortest remaining first, by the tokens still allowed: 1 / (1 + remaining), in (0, 1].

    The limit stands in for the length, which is not known before the end (Schrage 1968 proves mean
    latency least where it is).
    """

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        return 1.0 / (1.0 + signals.remaining.astype(state.priority.dtype))


@value
class LeastAttained:
    """Fewest tokens produced first: 1 / (1 + generated), in (0, 1].

    It needs to know nothing of what comes. On one server no rule that does not know lengths has a lower mean latency
    where a text is the less likely to end the longer it is (Aalto and Ayesta 2006); where lengths differ little, it
    makes all end late.
    """

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        return 1.0 / (1.0 + signals.generated.astype(state.priority.dtype))


@pytree
class DriftRecord:
    """The last raw entropy in nats, and the running mean (nats) and variance (nats^2) of its falls."""

    entropy: Float[Array, "*b"]
    mean: Float[Array, "*b"]
    variance: Float[Array, "*b"]


@value
class EntropyDrift(Law):
    """Keep the running mean (nats) and variance (nats^2) of the fall H_{t-1} - H_t of the raw entropy.

    Exponentially weighted, in the record "entropy_drift", from mean 0 and the variance of
    `prior_deviation` (nats), so that a sequence of which nothing is known is expected to resolve
    something. The entropy profile of Entropic-Time Inference, section 3.1, whose form is not stated.
    """

    decay: Number = 0.9
    prior_deviation: Number = 1.0
    weight: Number = derived()
    prior_variance: Number = derived()

    sets = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", 1.0 - self.decay)
        object.__setattr__(self, "prior_variance", self.prior_deviation * self.prior_deviation)

    def init(self, state: ControlState) -> ControlState:
        zero = jnp.zeros_like(state.priority)
        variance = jnp.full_like(state.priority, self.prior_variance)
        return claim(self, state, _DRIFT, DriftRecord(entropy=zero + jnp.inf, mean=zero, variance=variance))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        old: DriftRecord = state.records[_DRIFT]
        first = jnp.isinf(old.entropy)
        surprise = jnp.where(first, 0.0, old.entropy - signals.entropy - old.mean)
        variance = self.decay * (old.variance + self.weight * surprise * surprise)
        record = DriftRecord(
            entropy=signals.entropy,
            mean=old.mean + self.weight * surprise,
            variance=jnp.where(first, old.variance, variance),
        )
        return with_record(state, _DRIFT, record)


def expected_fall(mean: Float[Array, "*b"], deviation: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return E[max(0, x)] = mean Phi(mean / dev) + dev phi(mean / dev) of a normal x, in nats.

    It is max(0, mean) where the deviation is 0 and positive where it is not: a sequence whose entropy
    wanders is never written off.
    """
    ratio = mean / jnp.maximum(deviation, jnp.finfo(jnp.float32).tiny)
    fall = mean * norm.cdf(ratio) + deviation * norm.pdf(ratio)
    return jnp.where(deviation > 0, jnp.maximum(fall, 0.0), jnp.maximum(mean, 0.0))


def _drift_fall(state: ControlState) -> Float[Array, ""]:
    if _DRIFT not in state.records:
        raise ValueError(f"This priority reads the record {_DRIFT!r}; add the law EntropyDrift() to the chain.")
    record = state.records[_DRIFT]
    return expected_fall(record.mean, jnp.sqrt(record.variance))


@value
class LinearPriority:
    """The paper's four terms, summed: fall E[dH^+] - cost C - memory M + urgency L.

    E[dH^+] in nats from the law `EntropyDrift`, which must be in the chain; C the bytes of the last
    step, M the pages held, L the caller's urgency. Coefficients are per nat, byte, page and unit of
    urgency. The paper gives no values: bytes and pages cost nothing until a price is set. Source:
    Entropic-Time Inference, section 3.1.
    """

    fall: Number = 1.0
    cost: Number = 0.0
    memory: Number = 0.0
    urgency: Number = 1.0

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        pages = signals.allocated_pages.astype(state.priority.dtype)
        spent = self.cost * signals.cost
        return self.fall * _drift_fall(state) - spent - self.memory * pages + self.urgency * signals.urgency


@value
class RatioPriority:
    """Expected nats per byte, the reading of "per unit cost": fall E[dH^+] / (C + memory M) + urgency L.

    Terms as in `LinearPriority`; `memory` is in bytes per page. A sequence that has cost nothing yet
    counts as one byte. Source: Entropic-Time Inference, section 6.6.
    """

    fall: Number = 1.0
    memory: Number = 0.0
    urgency: Number = 1.0

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        spent = signals.cost + self.memory * signals.allocated_pages.astype(state.priority.dtype)
        return self.fall * _drift_fall(state) / jnp.maximum(spent, 1.0) + self.urgency * signals.urgency


@value
class Aged:
    """clip(rule, 0, ceiling) + rate * wait: no sequence waits longer than `waiting_bound`.

    `ceiling` is in the rule's own units, `rate` in those units per step waited. Where the rule exceeds
    the ceiling or falls below 0 its order is lost, `FCFS` being below 0 throughout.
    """

    rule: PriorityRule
    ceiling: Number
    rate: Number

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", as_value(self.rule))

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        score = jnp.clip(self.rule(signals, state), 0.0, self.ceiling)
        return score + self.rate * state.wait.astype(state.priority.dtype)


def waiting_bound(ceiling: float, rate: float, num_runnable: int, served_per_step: int) -> int:
    """Return the most steps a runnable sequence waits under `Aged`: floor(R / a) + 1 + floor((N - 1) / K).

    R is the ceiling, a the rate, N the most sequences runnable at once, K those served in every step.
    Once a w > R none served since can pass again, and newcomers start at 0. It needs K sequences that
    memory can hold at every step.
    """
    slack = 1e-6  # relative: float32 priorities may tie where the formula has a winner
    return math.floor(ceiling / rate * (1.0 + slack)) + 1 + (num_runnable - 1) // served_per_step

"""Scheduling priorities: which sequences a step decodes if more are resident than it has rows for.

A priority rule scores one sequence; the step decodes the highest scores. The published rules can starve a
sequence for ever: `Aged` wraps any of them and bounds the wait by `waiting_bound` steps.
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

    The limit replaces the length, which is unknown before the end (Schrage 1968 proves minimal mean
    latency for known lengths).
    """

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        return 1.0 / (1.0 + signals.remaining.astype(state.priority.dtype))


@value
class LeastAttained:
    """Fewest tokens produced first: 1 / (1 + generated), in (0, 1].

    It requires no knowledge of lengths. On one server no rule without such knowledge has a lower mean latency
    if a sequence is less likely to end the longer it is (Aalto and Ayesta 2006); if lengths differ little,
    all sequences finish late.
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
    """Records the running mean (nats) and variance (nats^2) of the fall H_{t-1} - H_t of the raw entropy.

    Exponentially weighted, in the record "entropy_drift", from mean 0 and the variance of
    `prior_deviation` (nats), so that a new sequence has a positive expected
    fall. The entropy profile of Entropic-Time Inference, section 3.1, whose form is not stated.
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

    It is max(0, mean) for deviation 0 and positive otherwise: a sequence with a varying entropy
    always has some priority.
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
    step, M the allocated pages, L the caller's urgency. Coefficients are per nat, byte, page and unit of
    urgency. The paper gives no values: by default bytes and pages have weight 0. Source:
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
    """Expected nats per byte, an interpretation of "per unit cost": fall E[dH^+] / (C + memory M) + urgency L.

    Terms as in `LinearPriority`; `memory` is in bytes per page. A sequence without costs so far
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

    `ceiling` is in the rule's own units, `rate` in those units per step waited. Outside [0, ceiling] the rule's
    order is lost; `FCFS` is below 0 throughout.
    """

    rule: PriorityRule
    ceiling: Number
    rate: Number

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", as_value(self.rule))

    def __call__(self, signals: Signals, state: ControlState) -> Float[Array, ""]:
        score = jnp.clip(self.rule(signals, state), 0.0, self.ceiling)
        return score + self.rate * state.wait.astype(state.priority.dtype)


def waiting_bound(ceiling: float, rate: float, num_runnable: int, decoded_per_step: int) -> int:
    """Return the most steps a runnable sequence waits under `Aged`: floor(R / a) + 1 + floor((N - 1) / K).

    R is the ceiling, a the rate, N the most sequences runnable at once, K those decoded in every step.
    Once a w > R no sequence decoded since can overtake it, and new ones start at 0. It requires that memory suffices
    for K sequences at every step.
    """
    slack = 1e-6  # relative: float32 priorities may tie where the formula has a winner
    return math.floor(ceiling / rate * (1.0 + slack)) + 1 + (num_runnable - 1) // decoded_per_step

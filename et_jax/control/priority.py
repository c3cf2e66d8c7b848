"""Who is served next when more sequences are resident than a step serves.

A priority rule scores one sequence; the step serves the highest scores. The printed rules can starve a
sequence for ever: `aged` wraps any of them so that it cannot, for `waiting_bound` steps at most.
"""

import math

import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Float

from et_jax.control.base import ControlState, Law, PriorityRule, Signals
from et_jax.types import replace


def fcfs() -> PriorityRule:
    """First come, first served: the negated arrival number."""

    def priority(signals: Signals, state: ControlState) -> Float[Array, ""]:
        return -signals.arrival.astype(state.priority.dtype)

    return priority


def srpt() -> PriorityRule:
    """Shortest remaining first, by the tokens still allowed: 1 / (1 + remaining), in (0, 1].

    The limit stands in for the length, which nobody knows before the end (Schrage 1968 proves mean
    latency least where it is known).
    """

    def priority(signals: Signals, state: ControlState) -> Float[Array, ""]:
        return 1.0 / (1.0 + signals.remaining.astype(state.priority.dtype))

    return priority


def entropy_drift(decay: float = 0.9, prior_deviation: float = 1.0) -> Law:
    """Keep the running mean (nats) and variance (nats^2) of the fall H_{t-1} - H_t of the raw entropy.

    Exponentially weighted, in `notes["entropy_drift"]`, from mean 0 and the variance of
    `prior_deviation` (nats), so that a sequence of which nothing is known is expected to resolve
    something. The entropy profile of Entropic-Time Inference, section 3.1, whose form is not stated.
    """

    def init(state: ControlState) -> ControlState:
        notes = {
            "previous_entropy": jnp.full_like(state.priority, jnp.inf),
            "mean": jnp.zeros_like(state.priority),
            "variance": jnp.full_like(state.priority, prior_deviation * prior_deviation),
        }
        return replace(state, notes=state.notes | {"entropy_drift": notes})

    def update(signals: Signals, state: ControlState) -> ControlState:
        old = state.notes["entropy_drift"]
        first = jnp.isinf(old["previous_entropy"])
        surprise = jnp.where(first, 0.0, old["previous_entropy"] - signals.entropy - old["mean"])
        variance = decay * (old["variance"] + (1.0 - decay) * surprise * surprise)
        notes = {
            "previous_entropy": signals.entropy,
            "mean": old["mean"] + (1.0 - decay) * surprise,
            "variance": jnp.where(first, old["variance"], variance),
        }
        return replace(state, notes=state.notes | {"entropy_drift": notes})

    return Law(update, init)


def expected_fall(mean: Float[Array, "*b"], deviation: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return E[max(0, x)] = mean Phi(mean / dev) + dev phi(mean / dev) of a normal x, in nats.

    It is max(0, mean) where the deviation is 0 and positive where it is not: a sequence whose entropy
    wanders is never written off.
    """
    ratio = mean / jnp.maximum(deviation, jnp.finfo(jnp.float32).tiny)
    fall = mean * norm.cdf(ratio) + deviation * norm.pdf(ratio)
    return jnp.where(deviation > 0, jnp.maximum(fall, 0.0), jnp.maximum(mean, 0.0))


def _drift_fall(state: ControlState) -> Float[Array, ""]:
    if "entropy_drift" not in state.notes:
        raise ValueError("this priority reads notes['entropy_drift']: add the law entropy_drift() to the chain")
    notes = state.notes["entropy_drift"]
    return expected_fall(notes["mean"], jnp.sqrt(notes["variance"]))


def paper_linear(fall: float = 1.0, cost: float = 0.0, memory: float = 0.0, urgency: float = 1.0) -> PriorityRule:
    """The paper's four terms, summed: fall E[dH^+] - cost C - memory M + urgency L.

    E[dH^+] in nats from the law `entropy_drift`, which must be in the chain; C the bytes of the last
    step, M the pages held, L the caller's urgency. Coefficients are per nat, byte, page and unit of
    urgency. The paper gives no values: bytes and pages cost nothing until a price is set. Source:
    Entropic-Time Inference, section 3.1.
    """

    def priority(signals: Signals, state: ControlState) -> Float[Array, ""]:
        pages = signals.pages_held.astype(state.priority.dtype)
        return fall * _drift_fall(state) - cost * signals.cost - memory * pages + urgency * signals.urgency

    return priority


def paper_ratio(fall: float = 1.0, memory: float = 0.0, urgency: float = 1.0) -> PriorityRule:
    """Expected nats per byte, the reading of "per unit cost": fall E[dH^+] / (C + memory M) + urgency L.

    Terms as in `paper_linear`; `memory` is in bytes per page. A sequence that has cost nothing yet
    counts as one byte. Source: Entropic-Time Inference, section 6.6.
    """

    def priority(signals: Signals, state: ControlState) -> Float[Array, ""]:
        spent = signals.cost + memory * signals.pages_held.astype(state.priority.dtype)
        return fall * _drift_fall(state) / jnp.maximum(spent, 1.0) + urgency * signals.urgency

    return priority


def aged(rule: PriorityRule, ceiling: float, rate: float) -> PriorityRule:
    """clip(rule, 0, ceiling) + rate * wait: no sequence waits longer than `waiting_bound`.

    `ceiling` is in the rule's own units, `rate` in those units per step waited. Where the rule exceeds
    the ceiling or falls below 0 its order is lost, `fcfs` being below 0 throughout.
    """

    def priority(signals: Signals, state: ControlState) -> Float[Array, ""]:
        return jnp.clip(rule(signals, state), 0.0, ceiling) + rate * state.wait.astype(state.priority.dtype)

    return priority


def waiting_bound(ceiling: float, rate: float, num_runnable: int, served_per_step: int) -> int:
    """Return the most steps a runnable sequence waits under `aged`: floor(R / a) + 1 + floor((N - 1) / K).

    R is the ceiling, a the rate, N the most sequences runnable at once, K those served in every step.
    Once a w > R nobody served since can pass again, and newcomers start at 0. It needs K sequences that
    memory can hold at every step.
    """
    slack = 1e-6  # relative: float32 priorities may tie where the formula has a winner
    return math.floor(ceiling / rate * (1.0 + slack)) + 1 + (num_runnable - 1) // served_per_step

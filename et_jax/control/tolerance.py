"""Tolerance: how much of the attention mass the next step may leave unread.

The entropy of a step is known only after its attention, so each law sets the tolerance of the next
step. Entropy sets how much may be left unread; a selector chooses which blocks. 0 opens every block.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import Number, Table, derived, replace, static, value


@value
class Constant(Law):
    """The same tolerance at every token: an attention mass, or the threshold theta of `select.ActiveSet`."""

    tolerance: Number

    sets = frozenset()

    def init(self, state: ControlState) -> ControlState:
        """Set the tolerance."""
        return replace(state, tolerance=jnp.full_like(state.tolerance, self.tolerance))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Return the state unchanged."""
        return state


@value
class EntropyThreshold(Law):
    """theta_{t+1} = greatest * clip(1 - H_t / reference, 0, 1), H_t the raw entropy in nats.

    The threshold that `select.ActiveSet` compares E_b with, in the units of E_b. The paper requires it to be
    set by the entropy regime and to prune hard only at low uncertainty; a line is the simplest such
    form. The first token prunes nothing. Wrap it in `guards.Floored` and `guards.RateLimited` for
    the paper's guards. Source: Entropic-Time Inference, sections 3.2 and 5.
    """

    greatest: Number
    reference_entropy: Number

    sets = frozenset({"tolerance"})

    def init(self, state: ControlState) -> ControlState:
        """Start at 0, which prunes nothing."""
        return replace(state, tolerance=jnp.zeros_like(state.tolerance))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Set the threshold from the raw entropy."""
        certainty = jnp.clip(1.0 - signals.entropy / self.reference_entropy, 0.0, 1.0)
        return replace(state, tolerance=self.greatest * certainty)


@value
class EntropyTolerance(Law):
    """The attention mass that may be left unread, interpolated geometrically from `least` to `greatest` by entropy.

    c = clip((reference - max(H_high, floor)) / (reference - floor), 0, 1), 0 where the raw varentropy
    exceeds `varentropy_limit` (nats^2) or the likeliest logit leads by less than `least_margin` (nats);
    log eps = (1 - c) log least + c log greatest, and eps is at most `rise` times the last (inf: no
    limit), so it falls at once and rises slowly. H_high is the upper end of the estimate, in nats.
    The first token gets `least`. The defaults are starting points, not calibrated.
    """

    least: Number = 1e-3
    greatest: Number = 5e-2
    floor: Number = 0.1
    reference_entropy: Number = 2.0
    rise: Number = 1.25
    varentropy_limit: Number = np.inf
    least_margin: Number = 0.0
    span: Number = derived()
    ratio: Number = derived()

    sets = frozenset({"tolerance"})

    def __post_init__(self) -> None:
        if self.least == 0:
            raise ValueError("EntropyTolerance: least is 0; it must be above 0")
        object.__setattr__(self, "span", self.reference_entropy - self.floor)
        object.__setattr__(self, "ratio", self.greatest / self.least)

    def init(self, state: ControlState) -> ControlState:
        """Start at `least`."""
        return replace(state, tolerance=jnp.full_like(state.tolerance, self.least))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Set the tolerance from the model's certainty."""
        raised = jnp.maximum(signals.entropy_high, self.floor)
        certainty = jnp.clip((self.reference_entropy - raised) / self.span, 0.0, 1.0)
        doubtful = (signals.varentropy > self.varentropy_limit) | (signals.margin < self.least_margin)
        certainty = jnp.where(doubtful, 0.0, certainty)
        wanted = self.least * self.ratio**certainty
        return replace(state, tolerance=jnp.minimum(wanted, self.rise * state.tolerance))


@value
class Shuffled(Law):
    """The given tolerances in order, one per token, then the last one for all later tokens; ignores entropy.

    The sequence of arrival number i replays row i (modulo q) of `tolerances`, "q t"; its first token gets
    `first`, its second the row's first. Given a permutation of the tolerances of an entropy-driven run of the same
    prompts, it spends the same tolerance at other tokens: if quality does not drop, the choice of tokens by entropy
    has no value.
    """

    tolerances: Any = static()
    first: Number = 0.0

    sets = frozenset({"tolerance"})

    def __post_init__(self) -> None:
        if not isinstance(self.tolerances, Table):
            object.__setattr__(self, "tolerances", Table(self.tolerances))

    def init(self, state: ControlState) -> ControlState:
        """Start with `first`."""
        return replace(state, tolerance=jnp.full_like(state.tolerance, self.first))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Set the next tolerance of the row."""
        rows = jnp.asarray(self.tolerances.array, jnp.float32)
        at = jnp.minimum(signals.generated - 1, rows.shape[1] - 1)
        return replace(state, tolerance=rows[signals.arrival % rows.shape[0], at])

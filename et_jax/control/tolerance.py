"""Tolerance: how much of the attention a step may leave unread, decided for the next token.

The entropy of a step is known only after its attention, so each law sets the tolerance of the step to
come. Entropy says how much may be dropped; it never chooses what. 0 opens every block.
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
        """Set it."""
        return replace(state, tolerance=jnp.full_like(state.tolerance, self.tolerance))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Leave it."""
        return state


@value
class EntropyThreshold(Law):
    """theta_{t+1} = greatest * clip(1 - H_t / reference, 0, 1), H_t the raw entropy in nats.

    The threshold that `select.ActiveSet` compares E_b with, in the units of E_b. The paper asks that it be
    set by the entropy regime and prune hard only when uncertainty is low; the line is the simplest form
    that does. The first token prunes nothing. Wrap it in `guards.Floored` and `guards.RateLimited` for
    the paper's guards. Source: Entropic-Time Inference, sections 3.2 and 5.
    """

    greatest: Number
    reference_entropy: Number

    sets = frozenset({"tolerance"})

    def init(self, state: ControlState) -> ControlState:
        """Prune nothing at first."""
        return replace(state, tolerance=jnp.zeros_like(state.tolerance))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Prune by how certain the model was."""
        certainty = jnp.clip(1.0 - signals.entropy / self.reference_entropy, 0.0, 1.0)
        return replace(state, tolerance=self.greatest * certainty)


@value
class EntropyTolerance(Law):
    """The attention mass that may be left unread, geometric between `least` and `greatest` in the entropy.

    c = clip((reference - max(H_high, floor)) / (reference - floor), 0, 1), 0 where the raw varentropy
    exceeds `varentropy_limit` (nats^2) or the likeliest logit leads by less than `least_margin` (nats);
    log eps = (1 - c) log least + c log greatest, and eps is at most `rise` times the last (inf: no
    limit), so it tightens at once and loosens slowly. H_high is the upper end of the estimate, in nats.
    The first token gets `least`. The defaults are starting points that no calibration has chosen.
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
        """Start with the least."""
        return replace(state, tolerance=jnp.full_like(state.tolerance, self.least))

    def __call__(self, signals: Signals, state: ControlState) -> ControlState:
        """Set it by how certain the model was."""
        raised = jnp.maximum(signals.entropy_high, self.floor)
        certainty = jnp.clip((self.reference_entropy - raised) / self.span, 0.0, 1.0)
        doubtful = (signals.varentropy > self.varentropy_limit) | (signals.margin < self.least_margin)
        certainty = jnp.where(doubtful, 0.0, certainty)
        wanted = self.least * self.ratio**certainty
        return replace(state, tolerance=jnp.minimum(wanted, self.rise * state.tolerance))


@value
class Shuffled(Law):
    """The given tolerances in order, one a token, the last for ever after; entropy plays no part.

    The sequence of arrival number i replays row i (modulo q) of `tolerances`, "q t"; its first token gets
    `first`, its second the row's first. Given a permutation of what an entropy-driven run of the same
    prompts decided, it spends the same tolerance at the wrong moments: if quality holds, entropy chose no
    moments worth choosing.
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
        """Take the next of the row."""
        rows = jnp.asarray(self.tolerances.array, jnp.float32)
        at = jnp.minimum(signals.generated - 1, rows.shape[1] - 1)
        return replace(state, tolerance=rows[signals.arrival % rows.shape[0], at])

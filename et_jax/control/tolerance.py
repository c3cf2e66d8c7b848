"""Tolerance: how much of the attention a step may leave unread, decided for the next token.

The entropy of a step is known only after its attention, so each law sets the tolerance of the step to
come. Entropy says how much may be dropped; it never chooses what. 0 opens every block.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.control.base import ControlState, Law, Signals
from et_jax.types import replace


def constant(tolerance: float) -> Law:
    """The same tolerance at every token: an attention mass, or the threshold theta of `select.paper`."""

    def init(state: ControlState) -> ControlState:
        return replace(state, tolerance=jnp.full_like(state.tolerance, tolerance))

    return Law(lambda signals, state: state, init)


def paper(greatest: float, reference_entropy: float) -> Law:
    """theta_{t+1} = greatest * clip(1 - H_t / reference, 0, 1), H_t the raw entropy in nats.

    The threshold that `select.paper` compares E_b with, in the units of E_b. The paper asks that it be
    set by the entropy regime and prune hard only when uncertainty is low; the line is the simplest form
    that does. The first token prunes nothing. Wrap it in `guards.floored` and `guards.rate_limited` for
    the paper's guards. Source: Entropic-Time Inference, sections 3.2 and 5.
    """

    def init(state: ControlState) -> ControlState:
        return replace(state, tolerance=jnp.zeros_like(state.tolerance))

    def update(signals: Signals, state: ControlState) -> ControlState:
        return replace(state, tolerance=greatest * jnp.clip(1.0 - signals.entropy / reference_entropy, 0.0, 1.0))

    return Law(update, init)


def entropy(
    least: float = 1e-3,
    greatest: float = 5e-2,
    floor: float = 0.1,
    reference_entropy: float = 2.0,
    rise: float = 1.25,
    varentropy_limit: float = jnp.inf,
    least_margin: float = 0.0,
) -> Law:
    """The attention mass that may be left unread, geometric between `least` and `greatest` in the entropy.

    c = clip((reference - max(H_high, floor)) / (reference - floor), 0, 1), 0 where the raw varentropy
    exceeds `varentropy_limit` (nats^2) or the likeliest logit leads by less than `least_margin` (nats);
    log eps = (1 - c) log least + c log greatest, and eps is at most `rise` times the last (inf: no
    limit), so it tightens at once and loosens slowly. H_high is the upper end of the estimate, in nats.
    The first token gets `least`. The defaults are starting points that no calibration has chosen.
    """

    def init(state: ControlState) -> ControlState:
        return replace(state, tolerance=jnp.full_like(state.tolerance, least))

    def update(signals: Signals, state: ControlState) -> ControlState:
        raised = jnp.maximum(signals.entropy_high, floor)
        certainty = jnp.clip((reference_entropy - raised) / (reference_entropy - floor), 0.0, 1.0)
        doubtful = (signals.varentropy > varentropy_limit) | (signals.margin < least_margin)
        certainty = jnp.where(doubtful, 0.0, certainty)
        wanted = least * (greatest / least) ** certainty
        return replace(state, tolerance=jnp.minimum(wanted, rise * state.tolerance))

    return Law(update, init)


def shuffled(tolerances: Float[Array, "q t"], first: float) -> Law:
    """The given tolerances in order, one a token, the last for ever after; entropy plays no part.

    The sequence of arrival number i replays row i (modulo q); its first token gets `first`, its second
    the row's first. Given a permutation of what an entropy-driven run of the same prompts decided, it
    spends the same tolerance at the wrong moments: if quality holds, entropy chose no moments worth
    choosing.
    """
    num_rows, num_tokens = tolerances.shape

    def init(state: ControlState) -> ControlState:
        return replace(state, tolerance=jnp.full_like(state.tolerance, first))

    def update(signals: Signals, state: ControlState) -> ControlState:
        at = jnp.minimum(signals.generated - 1, num_tokens - 1)
        return replace(state, tolerance=tolerances[signals.arrival % num_rows, at])

    return Law(update, init)

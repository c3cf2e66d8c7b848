"""Errors of one sequence in a step: found on the device as a number, reported on the host as a sentence."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import ControlState
from et_jax.control.entropy import Moments

_NUMBER = "that is not a number"
_FINITE = "that is not a finite number"
_HEAT = "that is not a finite number of at least 0"
_LAWS = {  # values that a law must not set a field to
    "temperature": _HEAT,
    "surprisal_cap": _NUMBER,
    "tolerance": _NUMBER,
    "entropy": _NUMBER,
    "entropic_time": _FINITE,
    "total_cost": _NUMBER,
}
_OF_LAWS = tuple(
    f"The control law set {field} to a value {what} after {{}} tokens; correct it." for field, what in _LAWS.items()
)
_SENTENCES = (  # in the order of precedence: an earlier one may have caused a later one
    "The logits after {} tokens are not numbers; the weights are damaged, or overflow in this dtype (try float32).",
    *_OF_LAWS,
    f"The priority rule returned a value {_NUMBER} after {{}} tokens; correct the rule.",
    f"The temperature rule returned a value {_HEAT} after {{}} tokens; correct the rule.",
    "The logits after {} tokens overflow under these penalties or at this temperature; choose smaller ones.",
    *_OF_LAWS,
)


def fault(
    raw: Float[Array, " r"],
    drawn: Float[Array, " r"],
    moments: Moments,
    before: ControlState,
    after: ControlState,
) -> Int[Array, " r"]:
    """Return the first fault of each row, 0 for none; `sentence` describes it.

    `raw` is a sum over the logits, `drawn` the temperature of the draw, `moments` those of the distribution drawn from,
    `before` the control state of the step, `after` that after the laws. Infinite caps and tolerances are valid:
    nothing is barred, or every block closed.
    """
    table = jnp.stack(
        [
            ~jnp.isfinite(raw),
            *(_unfit(getattr(before, field), what) for field, what in _LAWS.items()),
            jnp.isnan(before.priority),
            _unfit(drawn, _HEAT),
            overflows(moments),
            *(_unfit(getattr(after, field), what) for field, what in _LAWS.items()),
        ]
    )
    return jnp.where(jnp.any(table, axis=0), jnp.argmax(table, axis=0).astype(jnp.int32) + 1, 0)


def overflows(moments: Moments) -> Bool[Array, " r"]:
    """Return whether the sampling distribution is invalid: its greatest logit or a sum over it is not a number."""
    return ~(jnp.isfinite(moments.peak) & jnp.isfinite(moments.s0) & jnp.isfinite(moments.s1))


def sentence(fault: int, num_tokens: int) -> str:
    """Return the message for a fault after so many tokens."""
    return _SENTENCES[fault - 1].format(num_tokens)


def _unfit(value: Float[Array, " r"], what: str) -> Bool[Array, " r"]:
    if what == _NUMBER:
        return jnp.isnan(value)
    return ~jnp.isfinite(value) | ((value < 0) if what == _HEAT else False)

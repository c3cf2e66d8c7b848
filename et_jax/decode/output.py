"""The output of a step, and those of a burst of steps."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import Signals
from et_jax.decode.packed import Packed, packed, unpacked
from et_jax.decode.work import Work
from et_jax.types import pytree


@pytree
class Audit:
    """Of `audited` tokens that the other model produced and this one read now, `agreed` were its likeliest too."""

    audited: Int[Array, "*b"]
    agreed: Int[Array, "*b"]


@pytree
class StepOutput:
    """The results of a step for every slot; rows where `produced` is False are undefined.

    `refused` slots got no page: nothing of them changed. `fault` is above 0
    for a slot that was stopped, its sequence ending before this token: the logits were not numbers, or a law set
    a field to an invalid value (`faults.sentence`). `temperature`
    is the one the token was drawn at. `guard_rates` is the share of tokens that each counting guard has
    flagged, by its name. `top_tokens` and `top_logprobs` are None if the decoder reports none, and 0
    in steps where no sequence asks for them. `drafted` counts the tokens that were drafted for a slot in the step,
    `accepted` the accepted ones; both are reported with its first token. `work` is that of each of the decoder's models
    for the token; the first token includes the work for rejected drafts, and the number of passes over the weights.
    With two models in turns, `by_small` marks the tokens of the small one, and `audit` counts the agreement on the
    other's tokens, if requested; both are None otherwise. A sequence that waits for the other model gets no token,
    but its work counts. `reads` counts the blocks that each layer and KV head of the model read for the token, None
    unless the decoder reports it; undefined for a token of the small model of a switch.
    """

    token: Int[Array, "*b"]
    produced: Bool[Array, "*b"]
    finished: Bool[Array, "*b"]
    fault: Int[Array, "*b"]
    refused: Bool[Array, "*b"]
    temperature: Float[Array, "*b"]
    entropic_time: Float[Array, "*b"]
    total_cost: Float[Array, "*b"]
    drafted: Int[Array, "*b"]
    accepted: Int[Array, "*b"]
    guard_rates: dict[str, Float[Array, "*b"]]
    signals: Signals
    top_tokens: Int[Array, "*b a"] | None
    top_logprobs: Float[Array, "*b a"] | None
    work: tuple[Work, ...] = ()
    by_small: Bool[Array, "*b"] | None = None
    audit: Audit | None = None
    reads: Int[Array, "*b l k"] | None = None


def packed_step(output: StepOutput) -> Packed:
    """Return the output of a step that ran as one array, with a mark that tells it from a step that did not."""
    found: Any = packed((jnp.ones(len(output.token), bool), output))
    assert isinstance(found, Packed)
    return found


def unpacked_steps(burst: Packed) -> tuple[StepOutput, Int[Array, ""] | np.integer]:
    """Return the outputs of the steps of a burst, stacked, and the number of steps that were run."""
    marks, output = unpacked(burst)
    return output, marks[:, 0].sum()

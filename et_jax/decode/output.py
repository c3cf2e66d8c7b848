"""What a step reports."""

from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import Signals
from et_jax.decode.work import Work
from et_jax.types import pytree


@pytree
class Audit:
    """Of `audited` words that one of two models said and the other read now, `agreed` were the likeliest to it too."""

    audited: Int[Array, "*b"]
    agreed: Int[Array, "*b"]


@pytree
class StepOutput:
    """What a step did for every slot; rows where `produced` is False hold nothing to read.

    `refused` slots were to advance but no page was free: nothing of them changed. `fault` is above 0
    where a slot was stopped, its text ending before this token: the logits were no numbers, or a law set
    a field to what it may not be (`faults.sentence`). `temperature`
    is the one the token was drawn at. `guard_rates` is the share of tokens that each counting guard has
    flagged, by its name. `top_tokens` and `top_logprobs` are None where the decoder reports none, and 0
    in steps where no sequence asks for them. `drafted` counts the tokens that were drafted for a slot in the step,
    `accepted` those that held; both stand with its first token. `work` is what each of the decoder's models did for the
    token; with the first one is what the step did for the others that were drafted, and how often it read all weights.
    Where either of two models may speak, `by_small` tells whose token it is, and `audit` what one says of the other's
    words, if it is asked; both are None elsewhere. A sequence that waits for the other model gets no token, though
    work was done for it. `reads` counts the blocks that each layer and KV head of the model read for the token, None
    unless the decoder tells it; with a token of the small model of a switch it stands for nothing.
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

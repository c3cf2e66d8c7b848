"""What a step reports."""

from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import Signals
from et_jax.types import pytree


@pytree
class Spent:
    """What the model and the small one did for a sequence: tokens read, and passes, each divided by the rows it had.

    Of `audited` words that one said and the other read to catch up, `agreed` were the likeliest to the other; both are
    None where nothing is audited.
    """

    tokens: Int[Array, "*b m"]
    passes: Float[Array, "*b m"]
    audited: Int[Array, "*b"] | None
    agreed: Int[Array, "*b"] | None


@pytree
class StepOutput:
    """What a step did for every slot; rows where `produced` is False hold nothing to read.

    `refused` slots were to advance but no page was free: nothing of them changed. `fault` is above 0
    where a slot was stopped, its text ending before this token: the logits were no numbers, or a law set
    a field to what it may not be (`faults.sentence`). `temperature`
    is the one the token was drawn at. `guard_rates` is the share of tokens that each counting guard has
    flagged, by its name. `top_tokens` and `top_logprobs` are None where the decoder reports none, and 0
    in steps where no sequence asks for them. `drafted` counts the tokens that were drafted for a slot in the step,
    `accepted` those that held; `blocks_wasted` and `summaries_wasted` are what was read for the others. All four
    stand with its first token. So do `small_tokens`, those that the small model read for a slot, and `small_passes`,
    how often all its weights were read in the step; None where there is no such model. Where either model may speak,
    `by_small` tells whose token it is, and `spent` what both did for it, since the one before. `reads` counts the
    blocks that each layer and KV head of the model read for the token, None unless the decoder tells it; with a token
    of the small model of a switch it stands for nothing.
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
    blocks_wasted: Int[Array, "*b"]
    summaries_wasted: Int[Array, "*b"]
    guard_rates: dict[str, Float[Array, "*b"]]
    signals: Signals
    top_tokens: Int[Array, "*b a"] | None
    top_logprobs: Float[Array, "*b a"] | None
    small_tokens: Int[Array, "*b"] | None = None
    small_passes: Int[Array, "*b"] | None = None
    by_small: Bool[Array, "*b"] | None = None
    spent: Spent | None = None
    reads: Int[Array, "*b l k"] | None = None

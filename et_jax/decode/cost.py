"""The cost of a step, in bytes moved and in FLOPs, from shapes and from the work of the step.

Decoding is memory-bound: at small batches every weight and every listed page is read once per
step, and the step time is that of these reads.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """The cost of running a model.

    `weights` bytes are read in every pass, and `block` bytes with each block of a KV head; `summary` bytes are read
    to score it, with one 8-bit key of each of `codes` tokens. There are `heads` KV heads over all layers.
    `num_multiplied` weights are multiplied with every token, and `group_size` queries of `head_dim` channels with every
    key that they attend to. These weights exclude experts: each has `expert` bytes and `expert_weights` numbers, and a
    token is routed to `per_token` of them as trained, over all layers.
    """

    weights: int
    block: int
    summary: int
    num_multiplied: int
    heads: int
    group_size: int
    head_dim: int
    codes: int = 0
    expert: int = 0
    expert_weights: int = 0
    per_token: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Price:
    """The price of work: the bytes of weights, which the tokens of a step share, those of the cache, and FLOPs."""

    shared: Any
    own: Any
    flops: Any


def cached_bytes(model: Model, blocks: Any, summaries: Any) -> Any:
    """Return the bytes of so many blocks and summaries of the cache, counted over layers and KV heads."""
    return blocks * float(model.block) + summaries * float(model.summary)


def flops(model: Model, tokens: Any, attended: Any = 0.0, summaries: Any = 0.0, experts: Any = 0.0) -> Any:
    """Return the FLOPs of tokens, with at most the given numbers of attended keys, summaries and experts.

    They are two for each token and weight (an embedding counts only if it is the head too); four for each channel of
    an attended key and its value; and for each channel of a summary and query 8 for the two ends of the box and 2
    for the mean key, or 2 for every 8-bit key and 4 for their offset and rounding.
    """
    width = model.group_size * model.head_dim
    looking = (4.0 + 2.0 * model.codes if model.codes else 10.0) * width
    multiplied = model.num_multiplied * tokens + model.expert_weights * experts
    return 2.0 * multiplied + 4.0 * width * attended + looking * summaries


def price(model: Model, work: Any) -> Price:
    """Return the price of `Work` of a model, of one sequence or of many, in floats."""
    touched, chosen = (0, 0) if work.experts is None else (work.experts.touched, work.experts.chosen)
    return Price(
        shared=work.passes * float(model.weights) + touched * float(model.expert),
        own=cached_bytes(model, work.blocks, work.summaries),
        flops=flops(model, work.tokens, work.attended, work.summaries, chosen),
    )

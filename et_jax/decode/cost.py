"""What a step costs, in bytes moved and in FLOPs, from shapes and from what the step really did.

Bytes are the cost of decoding: at small batches every weight and every listed page is read once per
step, and reading them is what a step waits for.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What it takes to run a model.

    `weights` bytes are read in every pass, and `block` bytes with each block of a KV head; `summary` bytes are looked
    at to choose it, with one 8-bit key of each of `codes` tokens. There are `heads` KV heads over all layers.
    `num_multiplied` weights meet every token, and `group_size` queries of `head_dim` channels every key that it reads.
    Experts are no part of all these weights: each has `expert` bytes and `expert_weights` numbers, and a token goes to
    `per_token` of them as trained, over all layers.
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
    """What work comes to: the bytes of weights, which the tokens of a step share, those of the cache, and FLOPs."""

    shared: Any
    own: Any
    flops: Any


def cached_bytes(model: Model, blocks: Any, summaries: Any) -> Any:
    """Return the bytes of the cache that so many blocks and summaries are, counted over layers and KV heads."""
    return blocks * float(model.block) + summaries * float(model.summary)


def flops(model: Model, tokens: Any, attended: Any = 0.0, summaries: Any = 0.0, experts: Any = 0.0) -> Any:
    """Return the FLOPs of so many tokens, which met so many keys, summaries and experts, at most.

    They are two for each token and weight (an embedding counts only where it is the head too); four for each channel of
    a key and its value that a query meets; and for each channel of a summary and query 8 for the two ends of the box,
    2 for the mean key, and 2 for every 8-bit key.
    """
    width = model.group_size * model.head_dim
    looking = (10.0 + 2.0 * model.codes) * width
    multiplied = model.num_multiplied * tokens + model.expert_weights * experts
    return 2.0 * multiplied + 4.0 * width * attended + looking * summaries


def price(model: Model, work: Any) -> Price:
    """Return what `Work` of a model comes to: that of one sequence, or of many, in floats."""
    touched, chosen = (0, 0) if work.experts is None else (work.experts.touched, work.experts.chosen)
    return Price(
        shared=work.passes * float(model.weights) + touched * float(model.expert),
        own=cached_bytes(model, work.blocks, work.summaries),
        flops=flops(model, work.tokens, work.attended, work.summaries, chosen),
    )

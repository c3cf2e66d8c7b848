"""Forbidden, allowed, forced and biased tokens of a request, applied to its logits before sampling."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import unpack_blocks
from et_jax.types import pytree

MOST_BIASED = 300  # tokens with a bias
MOST_WORDS, WORD_TOKENS = 64, 8  # sequences of several tokens that are forbidden, and the tokens of each
MOST_FORCED = 16  # consecutive tokens that a grammar forces before the host sets the next ones
UNLIMITED = 2**31 - 1
"""The allowance of a slot without a grammar, which the host need not renew."""


@pytree
class Steering:
    """Forbidden, allowed and biased tokens, a row per slot; `on` is False for a request without any.

    Bit i of `allowed[j]` is set if token 32 j + i is permitted. `bias` is added to the logits of the tokens `bias_ids`,
    which are padded with the size of the vocabulary. `words` are token sequences whose last token must not follow the
    others; they are right-aligned and padded with -1. End tokens are not sampled before `min_tokens`, unless no other
    token is permitted.

    Under a grammar the host sets an allowance, `forced` and `next`: the next tokens are the right-aligned `forced`
    ones; the token after them must also have its bit in `next`. The allowance is the number of forced tokens plus one.
    """

    on: Bool[Array, "*b"]
    allowed: UInt32[Array, "*b w"]
    bias_ids: Int[Array, "*b n"]
    bias: Float[Array, "*b n"]
    words: Int[Array, "*b m l"]
    min_tokens: Int[Array, "*b"]
    forced: Int[Array, "*b f"]
    next: UInt32[Array, "*b w"]


def none(shape: tuple[int, ...], vocab_size: int) -> Steering:
    """Return steering without effect."""
    every = jnp.full((*shape, -(-vocab_size // 32)), 0xFFFFFFFF, jnp.uint32)
    return Steering(
        on=jnp.zeros(shape, bool),
        allowed=every,
        bias_ids=jnp.full((*shape, MOST_BIASED), vocab_size, jnp.int32),
        bias=jnp.zeros((*shape, MOST_BIASED), jnp.float32),
        words=jnp.full((*shape, MOST_WORDS, WORD_TOKENS), -1, jnp.int32),
        min_tokens=jnp.zeros(shape, jnp.int32),
        forced=jnp.full((*shape, MOST_FORCED), -1, jnp.int32),
        next=jnp.copy(every),
    )


def steering_fields(
    vocab_size: int,
    *,
    bias: Mapping[int, float],
    allowed: Iterable[int] | None,
    words: Iterable[Sequence[int]],
    min_tokens: int,
    constrained: bool = False,
) -> dict[str, Any]:
    """Return the fields of `Steering` for a request, as numpy arrays. A word of a single token is never sampled.

    A `constrained` request has a grammar, for which the host sets the permitted tokens from burst to burst.

    Raises ValueError for more biases, words or tokens of a word than supported.
    """
    several = [word for word in words if len(word) > 1]
    for name, got, most in (
        ("bias", len(bias), MOST_BIASED),
        ("words", len(several), MOST_WORDS),
        ("words", max(map(len, several), default=0), WORD_TOKENS),
    ):
        if got > most:
            raise ValueError(f"{name}: got {got}, wanted at most {most}")
    may = allowed_bits(vocab_size, allowed, words)
    ids, numbers = np.full(MOST_BIASED, vocab_size, np.int32), np.zeros(MOST_BIASED, np.float32)
    ids[: len(bias)], numbers[: len(bias)] = list(bias), list(bias.values())
    table = np.full((MOST_WORDS, WORD_TOKENS), -1, np.int32)
    for row, word in zip(table, several, strict=False):
        row[-len(word) :] = word
    return {
        "on": np.bool_(constrained or len(bias) > 0 or (~may).any() or bool(several) or min_tokens > 0),
        "allowed": may,
        "bias_ids": ids,
        "bias": numbers,
        "words": table,
        "min_tokens": np.int32(min_tokens),
        "forced": np.full(MOST_FORCED, -1, np.int32),
        "next": np.full_like(may, 0xFFFFFFFF),
    }


def allowed_bits(
    vocab_size: int, allowed: Iterable[int] | None, words: Iterable[Sequence[int]]
) -> UInt32[np.ndarray, " w"]:
    """Return `Steering.allowed` of a request: the tokens `allowed`, None for all, without single-token words."""
    may = np.ones(-(-vocab_size // 32) * 32, bool)
    if allowed is not None:
        may[:] = False
        may[list(allowed)] = True
    may[[word[0] for word in words if len(word) == 1]] = False
    return np.packbits(may, bitorder="little").view(np.uint32)


def may_draw(steering: Steering, allowance: Int[Array, " r"], vocab_size: int) -> Bool[Array, "r v"]:
    """Return the tokens that each row's grammar and allowed tokens permit."""
    may = unpack_blocks(steering.allowed & steering.next)[:, :vocab_size]
    forced, count = forced_ahead(steering, allowance, 1)
    return jnp.where(count[:, None] > 0, jnp.arange(vocab_size, dtype=jnp.int32) == forced, may)


def forced_ahead(
    steering: Steering, allowance: Int[Array, " r"], most: int
) -> tuple[Int[Array, "r t"], Int[Array, " r"]]:
    """Return the next `most` tokens of each row, and how many of them, from the first on, are forced."""
    left = jnp.where(allowance <= MOST_FORCED + 1, jnp.maximum(allowance - 1, 0), 0)
    place = MOST_FORCED - left[:, None] + jnp.arange(most, dtype=jnp.int32)
    token = jnp.take_along_axis(steering.forced, jnp.minimum(place, MOST_FORCED - 1), axis=1)
    return token, jnp.minimum(left, most)


def steer(
    logits: Float[Array, "r v"],
    steering: Steering,
    stop_ids: Int[Array, "r i"],
    generated: Int[Array, " r"],
    recent: Int[Array, "r l1"],
    may: Bool[Array, "r v"],
) -> Float[Array, "r v"]:
    """Return the biased logits, with -inf for tokens that are not permitted; `may` is the result of `may_draw`.

    `generated` tokens were sampled before. `recent` are the last tokens of prompt and text, padded with -1 in front. If
    forbidden words leave no token of a row, they are permitted.
    """
    size = logits.shape[-1]
    rows = jnp.arange(len(logits))[:, None]
    early = (generated < steering.min_tokens)[:, None] & (stop_ids >= 0)
    on = may.at[rows, jnp.where(early, stop_ids, size)].set(False, mode="drop")
    may = jnp.where(jnp.any(on, axis=-1, keepdims=True), on, may)
    biased = logits.at[rows, steering.bias_ids].add(steering.bias, mode="drop")
    left = jnp.where(may, biased, -jnp.inf)
    before, last = steering.words[..., :-1], steering.words[..., -1]
    follows = jnp.all((before < 0) | (before == recent[:, None, :]), axis=-1) & (last >= 0)
    worded = left.at[rows, jnp.where(follows, last, size)].set(-jnp.inf, mode="drop")
    return jnp.where(jnp.any(worded > -jnp.inf, axis=-1, keepdims=True), worded, left)


def recent_tokens(text: Int[Array, "b n"], slot: Int[Array, " r"], position: Int[Array, " r"]) -> Int[Array, "r l1"]:
    """Return the last tokens up to `position` of each row's text, padded with -1."""
    place = position[:, None] + jnp.arange(2 - WORD_TOKENS, 1, dtype=jnp.int32)
    return jnp.where(place >= 0, text[slot[:, None], jnp.maximum(place, 0)], -1)

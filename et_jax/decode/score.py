"""Scores of given text: the log-probability of every token given those before it, in one pass like prefill."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.decode.config import DecoderConfig
from et_jax.decode.plant import Weights
from et_jax.decode.prefill import read_chunks
from et_jax.decode.state import DecodeState
from et_jax.types import pytree


@pytree
class TokenScores:
    """The distribution after each token of a chunk: at temperature 1, before truncation.

    `log_prob` (nats) is that of the following token, `entropy` (nats) and `varentropy` (nats^2) are of the
    distribution, `likeliest` is its most probable token.
    """

    log_prob: Float[Array, "r t"]
    entropy: Float[Array, "r t"]
    varentropy: Float[Array, "r t"]
    likeliest: Int[Array, "r t"]


def score(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    slot: Int[Array, " r"],
    tokens: Int[Array, "r t"],
    count: Int[Array, " r"],
    last: Bool[Array, " r"],
    following: Int[Array, "r t"],
) -> tuple[DecodeState, TokenScores]:
    """Write chunks into the cache as `prefill` does, and return the scores of the tokens `following` theirs.

    Pages must suffice for all of them: the scores of a refused slot are invalid. Raises ValueError for a
    decoder whose small model reads the prompts.
    """
    state, _, logits = read_chunks(config, weights, state, slot, tokens, count, last)
    if logits is None:
        raise ValueError("config: got one whose small model reads prompts, wanted lazy=False")
    moments = entropy.moments(logits)
    chosen = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
    found = TokenScores(
        log_prob=chosen - entropy.log_normaliser(moments),
        entropy=entropy.entropy(moments),
        varentropy=entropy.varentropy(moments),
        likeliest=jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )
    return state, found

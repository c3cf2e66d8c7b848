"""Sampling settings, penalties on logits, and the exponential race that samples a token with the request's noise."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.entropy import HEAT
from et_jax.decode.sampling.noise import race_noise
from et_jax.types import pytree, replace


@pytree
class Sampling:
    """The sampling settings of requests, a row per slot.

    `temperature` 0 is greedy. Off values: `top_k` 0, `top_p` 1, `min_p` 0, `top_n_sigma` 0, `min_k` 0,
    `typical_p` 1, `eta_cutoff` 0, `top_h` 0, `p_less` False, `repetition_penalty` 1, `presence_penalty` and
    `frequency_penalty` 0. The truncations are those of `truncation.truncate`. `key` is the request's own key data; the
    noise of a token is that of the key and the token's position.
    """

    temperature: Float[Array, "*b"]
    top_k: Int[Array, "*b"]
    top_p: Float[Array, "*b"]
    min_p: Float[Array, "*b"]
    top_n_sigma: Float[Array, "*b"]
    min_k: Float[Array, "*b"]
    typical_p: Float[Array, "*b"]
    eta_cutoff: Float[Array, "*b"]
    top_h: Float[Array, "*b"]
    p_less: Bool[Array, "*b"]
    repetition_penalty: Float[Array, "*b"]
    presence_penalty: Float[Array, "*b"]
    frequency_penalty: Float[Array, "*b"]
    key: UInt32[Array, "*b 2"]


@pytree
class TokenCounts:
    """The tokens of each slot, for penalties: which are in the prompt, and counts of generated ones."""

    in_prompt: Bool[Array, "*b v"]
    generated: Int[Array, "*b v"]


def plain(shape: tuple[int, ...]) -> Sampling:
    """Return greedy settings with everything off."""
    zeros, ones = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
    return Sampling(
        temperature=zeros,
        top_k=jnp.zeros(shape, jnp.int32),
        top_p=ones,
        min_p=zeros,
        top_n_sigma=zeros,
        min_k=zeros,
        typical_p=ones,
        eta_cutoff=zeros,
        top_h=zeros,
        p_less=jnp.zeros(shape, bool),
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        key=jnp.zeros((*shape, 2), jnp.uint32),
    )


def penalises(sampling: Sampling) -> Bool[Array, "*b"]:
    """Return whether any penalty is on."""
    off = (sampling.presence_penalty == 0) & (sampling.frequency_penalty == 0)
    return ~(off & (sampling.repetition_penalty == 1))


def penalise(logits: Float[Array, "b v"], sampling: Sampling, counts: TokenCounts) -> Float[Array, "b v"]:
    """Return logits after the requests' penalties.

    Repetition counts prompt and generated tokens (Keskar et al. 2019); presence and frequency count only generated
    tokens, as in the OpenAI API.
    """
    seen = counts.in_prompt | (counts.generated > 0)
    repetition = sampling.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - sampling.frequency_penalty[:, None] * counts.generated.astype(jnp.float32)
    return logits - sampling.presence_penalty[:, None] * (counts.generated > 0).astype(jnp.float32)


def count(
    counts: TokenCounts, rows: Int[Array, " r"] | None, token: Int[Array, " r"], produced: Bool[Array, " r"]
) -> TokenCounts:
    """Return the counts after adding `token` to each of `rows` (None: all) that `produced` one."""
    rows = jnp.arange(token.shape[0]) if rows is None else rows
    return replace(counts, generated=counts.generated.at[rows, token].add(produced.astype(jnp.int32)))


def fold_key(sampling: Sampling, number: Int[Array, ""]) -> Sampling:
    """Return a request's settings with `number` folded into its key."""
    key = jax.random.fold_in(jax.random.wrap_key_data(sampling.key, impl="threefry2x32"), number)
    return replace(sampling, key=jax.random.key_data(key))


def sample_token(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    cut: Float[Array, " b"],
    key: UInt32[Array, "b 2"],
    position: Int[Array, " b"],
) -> Int[Array, " b"]:
    """Return a token per row, sampled from softmax(logits / temperature) over logits >= cut.

    It is the winner of a race: the greatest weight / E, with the noise E of `race_noise` for the key and the token's
    position. At temperature 0 it is the first greatest logit. Noise is computed if any row has a temperature above 0,
    for the full vocabulary: on a CPU, gathering the few tokens that a cut leaves takes longer than their noise.
    """
    warm = temperature > 0

    def race() -> Int[Array, " b"]:
        heat = divisor(temperature)[:, None]
        weight = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / heat)
        score = jnp.where(logits >= cut[:, None], weight / race_noise(key, position, logits.shape[-1]), 0.0)
        return _first_of_greatest(jnp.where(warm[:, None], score, logits))

    return jax.lax.cond(jnp.any(warm), race, lambda: _first_of_greatest(logits))


def divisor(temperature: Float[Array, " b"]) -> Float[Array, " b"]:
    """Return the divisor of logits, 1 if the temperature is 0."""
    return jnp.where(temperature > 0, jnp.clip(temperature, *HEAT), 1.0)


def _first_of_greatest(score: Float[Array, "b v"]) -> Int[Array, " b"]:
    """Return the argmax of every row; XLA's own takes over ten times as long on a CPU."""
    last = score.shape[-1] - 1
    peak = jnp.max(score, axis=-1, keepdims=True)
    return jnp.min(jnp.where(score == peak, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)

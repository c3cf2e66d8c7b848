"""One token from logits: penalties, temperature, truncation, a race with the noise of the request's own key.

Nothing sorts the vocabulary. Truncation finds one threshold per row: tokens whose logit reaches it are
kept, ties together. Thresholds are bisected over the ordered bit patterns of float32, so they are exact.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.entropy import HEAT
from et_jax.decode.noise import race_noise
from et_jax.sums import total
from et_jax.types import pytree, replace

_ROWS_TOGETHER = 4  # rows of logits that a CPU truncates together: it passes over those rows alone that ask for it


@pytree
class Sampling:
    """What a request asks of sampling, one row per slot.

    `temperature` 0 is greedy. Off values: `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1,
    `presence_penalty` and `frequency_penalty` 0. `key` is the request's own key data; the noise
    of a token is that of the key and the token's position.
    """

    temperature: Float[Array, "*b"]
    top_k: Int[Array, "*b"]
    top_p: Float[Array, "*b"]
    min_p: Float[Array, "*b"]
    repetition_penalty: Float[Array, "*b"]
    presence_penalty: Float[Array, "*b"]
    frequency_penalty: Float[Array, "*b"]
    key: UInt32[Array, "*b 2"]


@pytree
class TokenCounts:
    """What each slot has seen, for penalties: prompt tokens, generated counts."""

    in_prompt: Bool[Array, "*b v"]
    generated: Int[Array, "*b v"]


def plain(shape: tuple[int, ...]) -> Sampling:
    """Return settings that ask for nothing, greedy."""
    zeros, ones = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
    return Sampling(
        temperature=zeros,
        top_k=jnp.zeros(shape, jnp.int32),
        top_p=ones,
        min_p=zeros,
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
    """Return logits after the penalties that the requests ask for.

    Repetition counts prompt and text (Keskar et al. 2019); presence and frequency count the text alone,
    as the OpenAI API defines them.
    """
    seen = counts.in_prompt | (counts.generated > 0)
    repetition = sampling.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - sampling.frequency_penalty[:, None] * counts.generated.astype(jnp.float32)
    return logits - sampling.presence_penalty[:, None] * (counts.generated > 0).astype(jnp.float32)


def count(
    counts: TokenCounts, rows: Int[Array, " r"] | None, token: Int[Array, " r"], produced: Bool[Array, " r"]
) -> TokenCounts:
    """Return the counts after one more token in every one of `rows` (None: all) where one was produced."""
    rows = jnp.arange(token.shape[0]) if rows is None else rows
    return replace(counts, generated=counts.generated.at[rows, token].add(produced.astype(jnp.int32)))


def threshold(
    logits: Float[Array, "b v"], temperature: Float[Array, " b"], sampling: Sampling, least: Float[Array, " b"]
) -> Float[Array, " b"]:
    """Return the least logit each row keeps: the strictest of `least`, top-k, top-p of what top-k kept, min-p.

    Never above the greatest logit, so that a token is always left. Rows that are greedy or ask for
    nothing get `least`; a truncation's passes are made for rows that ask for it.
    """
    asks = temperature > 0
    peak = jnp.max(logits, axis=-1)
    heat = _divisor(temperature)
    wants_k = asks & (sampling.top_k > 0) & (sampling.top_k < logits.shape[-1])
    wants_p = asks & (sampling.top_p < 1.0)

    def bisect_k(rows: Int[Array, " t"]) -> Float[Array, " t"]:
        some = logits[rows]
        return _cut(some, jnp.ones_like(some), sampling.top_k[rows].astype(jnp.float32))

    cut_k = _among(wants_k, bisect_k)

    def bisect_p(rows: Int[Array, " t"]) -> Float[Array, " t"]:
        some = logits[rows]
        mass = jnp.exp((some - peak[rows][:, None]) / heat[rows][:, None])
        mass = jnp.where(some >= cut_k[rows][:, None], mass, 0.0)
        return _cut(some, mass, sampling.top_p[rows] * total(mass))

    cut_p = _among(wants_p, bisect_p)
    cut_min = jnp.where(asks, peak + heat * jnp.log(sampling.min_p), -jnp.inf)
    cut = jnp.maximum(jnp.maximum(cut_k, cut_p), jnp.maximum(cut_min, least))
    return jnp.minimum(cut, peak)


def _among(wanted: Bool[Array, " b"], find: Callable[[Int[Array, " t"]], Float[Array, " t"]]) -> Float[Array, " b"]:
    """Return what `find` says of the rows that are `wanted`, -inf for the rest, which cost nothing on a CPU.

    There `find` is asked of a few rows at a time, elsewhere of all at once if any is wanted.
    """
    b, size = wanted.shape[0], _ROWS_TOGETHER

    def all_at_once() -> Float[Array, " b"]:
        # no loop of one trip at most: XLA takes what no trip changes out of it, and does it for no trip too
        every, nothing = jnp.arange(b, dtype=jnp.int32), jnp.full(b, -jnp.inf, jnp.float32)
        return jax.lax.cond(jnp.any(wanted), lambda: find(every), lambda: nothing)

    def in_tiles() -> Float[Array, " b"]:
        padding = jnp.full(-b % size, b, jnp.int32)
        order = jnp.concatenate([jnp.argsort(~wanted).astype(jnp.int32), padding])

        def ask(i: Int[Array, ""], found: Float[Array, " b"]) -> Float[Array, " b"]:
            rows = jax.lax.dynamic_slice_in_dim(order, i * size, size)
            return found.at[rows].set(find(jnp.minimum(rows, b - 1)), mode="drop")

        tiles = (jnp.sum(wanted, dtype=jnp.int32) + size - 1) // size
        return jax.lax.fori_loop(0, tiles, ask, jnp.full(b, -jnp.inf, jnp.float32))

    found = jax.lax.platform_dependent(cpu=in_tiles if b > size else all_at_once, default=all_at_once)
    return jnp.where(wanted, found, -jnp.inf)


def _cut(logits: Float[Array, "b v"], weight: Float[Array, "b v"], goal: Float[Array, " b"]) -> Float[Array, " b"]:
    """Return the greatest logit x of each row such that the tokens with logit >= x weigh at least `goal`."""
    keys = _ordered(logits)

    def halve(_: Int[Array, ""], bounds: tuple[UInt32[Array, " b"], UInt32[Array, " b"]]):
        low, high = bounds  # the weight at or above low reaches the goal; above high it does not
        middle = low + (high - low) // 2 + (high - low) % 2
        reached = total(jnp.where(keys >= middle[:, None], weight, 0.0)) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    low, _ = jax.lax.fori_loop(0, 32, halve, (jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)))
    return _unordered(low)


def _ordered(x: Float[Array, "*b"]) -> UInt32[Array, "*b"]:
    """Map float32 to integers in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _unordered(keys: UInt32[Array, "*b"]) -> Float[Array, "*b"]:
    bits = jnp.where(keys >> 31 == 1, keys ^ jnp.uint32(0x80000000), ~keys)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def fold_key(sampling: Sampling, number: Int[Array, ""]) -> Sampling:
    """Return one request's settings with `number` folded into its key."""
    key = jax.random.fold_in(jax.random.wrap_key_data(sampling.key, impl="threefry2x32"), number)
    return replace(sampling, key=jax.random.key_data(key))


def sample_token(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    cut: Float[Array, " b"],
    key: UInt32[Array, "b 2"],
    position: Int[Array, " b"],
) -> Int[Array, " b"]:
    """Return one token per row, sampled from softmax(logits / temperature) over logits >= cut.

    The winner of a race: the greatest weight / E, with the noise E of `race_noise` for the key and the position that
    the token will have. Greedy where the temperature is 0: the first of the greatest. Noise is made if any row is warm,
    for the whole vocabulary: on a CPU, gathering the few tokens that a cut leaves takes longer than their noise.
    """
    warm = temperature > 0

    def race() -> Int[Array, " b"]:
        heat = _divisor(temperature)[:, None]
        weight = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / heat)
        score = jnp.where(logits >= cut[:, None], weight / race_noise(key, position, logits.shape[-1]), 0.0)
        return _first_of_greatest(jnp.where(warm[:, None], score, logits))

    return jax.lax.cond(jnp.any(warm), race, lambda: _first_of_greatest(logits))


def _divisor(temperature: Float[Array, " b"]) -> Float[Array, " b"]:
    """What logits are divided by, 1 where the temperature is 0."""
    return jnp.where(temperature > 0, jnp.clip(temperature, *HEAT), 1.0)


def _first_of_greatest(score: Float[Array, "b v"]) -> Int[Array, " b"]:
    """The argmax of every row: XLA's own takes over ten times as long on a CPU."""
    last = score.shape[-1] - 1
    peak = jnp.max(score, axis=-1, keepdims=True)
    return jnp.min(jnp.where(score == peak, jnp.arange(last + 1, dtype=jnp.int32), last), axis=-1)

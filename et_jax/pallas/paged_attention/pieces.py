"""Attention of queries to pieces of lists of blocks, and the softmax states that are merged from those of pieces.

Everything between gather and products is computed row by row, in arrays of the shape of as many slots of one row: XLA
rounds an exponential differently in another shape.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from et_jax import sums
from et_jax.pallas.gather import token_scales, tokens
from et_jax.softmax import Softmax, finite
from et_jax.types import pytree

LOG_2_HIGH = 0.693359375  # nine bits: times a whole number below 2^15 it is exact
LOG_2_LOW = math.log(2.0) - LOG_2_HIGH


@pytree
class State:
    """The softmax state of queries: the sum and the mixed values, both relative to 2 to the `exponent`."""

    exponent: Float[Array, "*x g"]
    total: Float[Array, "*x g"]
    mixed: Float[Array, "*x g d"]


def begun(rows: int, group: int, head_dim: int, sinks: Float[Array, "x g"] | None) -> State:
    """Return the initial state of rows. A sink is one more logit without a value."""
    exponent = jnp.full((rows, group), -jnp.inf, jnp.float32)
    total = jnp.zeros_like(exponent)
    if sinks is not None:
        exponent = _exponent(sinks)
        total = jnp.exp(_below(sinks, exponent))
    return State(exponent=exponent, total=total, mixed=jnp.zeros((rows, group, head_dim), jnp.float32))


def merged(running: State, states: State) -> State:
    """Return the state "x g" of the rows of lists after further pieces, "x n g".

    All weights are powers of two, so products are exact: in a small loop LLVM may round a product and the sum that it
    goes into at once.
    """
    exponent = jnp.maximum(running.exponent, jnp.max(states.exponent, axis=1))
    decay, weights = _power(running.exponent - finite(exponent)), _power(states.exponent - finite(exponent)[:, None])
    mixed = sums.total(states.mixed * weights[..., None], axis=1)
    return State(
        exponent=exponent,
        total=running.total * decay + sums.total(states.total * weights, axis=1),
        mixed=running.mixed * decay[..., None] + mixed,
    )


def _power(exponent: Float[Array, "*x"]) -> Float[Array, "*x"]:
    """Return 2 to the power of whole numbers of at most 0, exactly; 0 below -126."""
    bits = (jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)


def _exponent(maximum: Float[Array, "*x"]) -> Float[Array, "*x"]:
    """Return the whole number of powers of two that holds e to the maximum; minus infinity for minus infinity."""
    return jnp.ceil(maximum * (1.0 / math.log(2.0)))


def _below(x: Float[Array, "*x"], exponent: Float[Array, "*#x"]) -> Float[Array, "*x"]:
    """Return x - log(2) exponent, rounded as if log(2) were exact; exponents above 16,000 lose accuracy."""
    high, low = lax.optimization_barrier((exponent * LOG_2_HIGH, exponent * LOG_2_LOW))
    return lax.optimization_barrier((x - high) - low)


def attend(
    query: Float[Array, "x r g w"],
    slot: Int[Array, " x"],
    first_row: Int[Array, " x"],
    lengths: Int[Array, "x r"],
    listed: Int[Array, " x"],
    ids: Int[Array, "x m"],
    readers: Int[Array, "x m"] | None,
    *,
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    dtype: jnp.dtype,
    joint: bool,
    softmax: Softmax,
    head_dim: int,
    kv_scales: Float[Array, "k p 2 s"] | None,
) -> tuple[Float[Array, "x r g 2+m"], Float[Array, "x r g d"]]:
    """Return the softmax states of pieces: exponent, total and the log-sum-exp of each block, and the mixed values.

    `ids` are the blocks of the pieces, of which the first `listed` count, and `readers` theirs. The pages of a
    piece's KV head begin in the pool, viewed as "k*p s e", at `first_row`.
    """
    (s, e), (x, group), (_, r, g, width) = pages.shape[2:], ids.shape, query.shape
    full, d = joint and r == 1, head_dim
    query = query.reshape(x * r, g, width)
    counts = jnp.arange(group, dtype=jnp.int32) < listed[:, None]
    ids = jnp.where(counts, ids, 0)
    reads = counts[:, None]
    if readers is not None:
        reads = reads & ((readers[:, None] >> jnp.arange(r, dtype=jnp.int32)[:, None]) & 1 == 1)
    end = jnp.where(reads, lengths[..., None] - ids[:, None] * s, 0).reshape(x * r, group, 1)
    # the barriers keep XLA from computing these again for every element of the gathers
    rows, end = lax.optimization_barrier((page_table[slot[:, None], ids] + first_row[:, None], end))
    offset = jnp.arange(s, dtype=jnp.int32)
    seen_mask = offset < end
    if softmax.window is not None:
        seen_mask &= offset >= end - softmax.window
    seen_mask = lax.optimization_barrier(seen_mask)
    # on a CPU a product is bitwise independent of the other rows of a slot only in bfloat16
    together = r if dtype == jnp.bfloat16 else 1

    def clean(token: Array, of_padding: bool = False) -> Array:
        """Return tokens of which those that no row of the slot attends to are 0, because 0 * NaN is NaN."""
        if kv_scales is not None:  # 8 bits are finite
            return token
        visible = jnp.any(seen_mask.reshape(x, r, group * s, 1), axis=1)
        if of_padding:
            visible = visible & (jnp.arange(e, dtype=jnp.int32) < 2 * d)
        return jnp.where(visible, token, jnp.zeros((), dtype))

    def read() -> tuple[Array, Array]:
        """Return the keys and values of the pieces."""
        if joint:
            token = clean(tokens(pages, rows, 0, e).astype(dtype), of_padding=e > 2 * d)
            token = lax.optimization_barrier(token)
            return (token, token) if full else tuple(lax.optimization_barrier((token[..., :d], token[..., d : 2 * d])))
        key, value = (tokens(pages, rows, start, d).astype(dtype) for start in (0, d))
        key_value = key, clean(value)
        # for several rows XLA takes a tenth less if they are stored first, in bfloat16
        return lax.optimization_barrier(key_value) if r > 1 else key_value

    def for_each_row(scale: Array) -> Array:
        """Return the scales "x m s" of the tokens of a piece, for each row of its slot: "x*r m s"."""
        return jnp.broadcast_to(scale[:, None], (x, r, group, s)).reshape(x * r, group, s)

    def by_slot(product: Callable[[Array], Array], rows: Array) -> Array:
        """Return the product "y q n" of every row's "x*r g n", computed for `together` rows of a slot at once."""
        if r == 1:
            return product(rows)
        rows = lax.optimization_barrier(rows).reshape(x, r * g, -1)
        parts = [product(rows[:, i : i + together * g]) for i in range(0, r * g, together * g)]
        return lax.optimization_barrier(jnp.concatenate(parts, axis=1).reshape(x * r, g, -1))

    key, value = read()

    def scored(query: Array) -> Array:
        """Return queries times keys: in float32 XLA is faster with the keys, the larger operand, first."""
        if dtype == jnp.float32 and not joint:
            scores = jnp.einsum("xtd,xgd->xtg", key, query, preferred_element_type=jnp.float32)
            return lax.optimization_barrier(scores).swapaxes(1, 2)
        return jnp.einsum("xgd,xtd->xgt", query, key, preferred_element_type=jnp.float32)

    def mixture(weights: Array) -> Array:
        return jnp.einsum("xgt,xtd->xgd", weights, value, preferred_element_type=jnp.float32)

    scores = by_slot(scored, query) * softmax.scale
    value_scale = None
    if kv_scales is not None:  # 8 bits are exact in bfloat16: scores and weights are scaled, not the tokens
        key_scale, value_scale = map(for_each_row, token_scales(kv_scales, rows))
        scores = scores * key_scale.reshape(x * r, 1, group * s)
    scores = softmax.capped(scores)
    scores = jnp.where(seen_mask[:, None], scores.reshape(x * r, g, group, s), -jnp.inf)

    # one exponential per token, relative to its own block's maximum, gives the block's sum and the output
    scores = lax.optimization_barrier(scores)
    block_maximum = lax.optimization_barrier(jnp.max(scores, axis=-1))
    exponent = _exponent(jnp.max(block_maximum, axis=-1))
    weights = jnp.exp(scores - finite(block_maximum)[..., None])
    # a separate sum, or the compiler merges it into the total and rounds differently if block_lse is unused
    block_total = lax.optimization_barrier(sums.total(weights))
    block_lse = finite(block_maximum) + jnp.log(block_total)

    block_weight = jnp.exp(_below(block_maximum, finite(exponent)[..., None]))
    total = sums.total(block_total * block_weight)
    weights = weights * block_weight[..., None]
    if value_scale is not None:
        weights = jnp.where(seen_mask[:, None], weights * value_scale[:, None], 0.0)  # 0 * NaN is NaN
    weights = weights.reshape(x * r, g, group * s).astype(dtype)
    mixed = by_slot(mixture, weights)
    if full:
        mixed = mixed[..., d : 2 * d]
    logs = jnp.concatenate([exponent[..., None], total[..., None], block_lse], axis=-1)
    return logs.reshape(x, r, g, -1), mixed.reshape(x, r, g, d)

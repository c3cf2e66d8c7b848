"""Estimates of a prompt segment's attention from the summaries of earlier pages, before it is computed.

A segment is a run of prompt tokens whose queries share one list of blocks for each KV head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.bounds import Interval
from et_jax.sums import log_softmax, total
from et_jax.types import pytree, static

HIGHEST = jax.lax.Precision.HIGHEST


@pytree
class Segment:
    """What a budget reads of one segment in one layer.

    `score` estimates the attention of each KV head's queries to a block (`observed`), times the model's `scale`, the
    1/sqrt(d) of its attention; `visible` masks the blocks entirely before the segment, of `block_size` tokens each.
    `interval` bounds the scores of any key of a block for any query of a group, over the groups `x`; None unless the
    budget needs it. `layer` is the layer's number, `index` the number of earlier segments of the prompt.
    """

    score: Float[Array, "k n"]
    visible: Bool[Array, " n"]
    interval: Interval | None
    index: Int[Array, ""]
    layer: Int[Array, ""]
    block_size: int = static()
    scale: float = static()


def observed(
    q: Float[Array, "t k g d"], real: Bool[Array, " t"], key_min: Float[Array, "k n d"], key_max: Float[Array, "k n d"]
) -> Float[Array, "k n"]:
    """Return the score of each block for the `real` queries of a segment, unscaled: EntropyInfer's observation.

        a = mean over the group of max(m . key_max, m . key_min),   m = (max q + min q) / 2, channel by channel

    An estimate, not a bound. 0 if no query is real.
    """
    high = jnp.max(q, axis=0, where=real[:, None, None, None], initial=-jnp.inf)
    low = jnp.min(q, axis=0, where=real[:, None, None, None], initial=jnp.inf)
    middle = jnp.where(jnp.any(real), 0.5 * (high + low), 0.0)
    ends = [jnp.einsum("kgd,knd->kgn", middle, key, precision=HIGHEST) for key in (key_min, key_max)]
    return jnp.mean(jnp.maximum(*ends), axis=1)


def interval(
    q: Float[Array, "t k g d"],
    real: Bool[Array, " t"],
    key_min: Float[Array, "k n d"],
    key_max: Float[Array, "k n d"],
    group: int,
) -> Interval:
    """Return bounds on query . key, "k x n", for every `group` queries in a row, of each query head, and block of keys.

    With m the middle of the queries' box and r half its width, channel by channel:

        sum_c min(m_c min_c, m_c max_c) - r_c |key|_c <= q . key <= sum_c max(m_c min_c, m_c max_c) + r_c |key|_c

    where |key| is the greatest size of a channel in the block. A group without a real query has the least float
    as its upper ends, and so requires nothing.
    """
    t, k, g, d = q.shape
    padded = jnp.pad(q, ((0, -t % group), (0, 0), (0, 0), (0, 0))).reshape(-1, group, k, g, d)
    here = jnp.pad(real, (0, -t % group)).reshape(-1, group)[:, :, None, None, None]
    high = jnp.max(padded, axis=1, where=here, initial=-jnp.inf)
    low = jnp.min(padded, axis=1, where=here, initial=jnp.inf)
    some = jnp.any(here, axis=1)
    middle, radius = (jnp.where(some, 0.5 * x, 0.0) for x in (high + low, high - low))
    size = jnp.maximum(jnp.abs(key_min), jnp.abs(key_max))

    def times(rows: Float[Array, "y k g d"], key: Float[Array, "k n d"]) -> Float[Array, "k x n"]:
        return jnp.einsum("ykgd,knd->kygn", rows, key, precision=HIGHEST).reshape(k, -1, key.shape[1])

    up, down, apart = jnp.maximum(middle, 0.0), jnp.minimum(middle, 0.0), times(radius, size)
    low = times(up, key_min) + times(down, key_max) - apart
    high = times(up, key_max) + times(down, key_min) + apart
    return Interval(low=low, high=jnp.where(jnp.repeat(some.reshape(-1), g)[:, None], high, jnp.finfo(high.dtype).min))


def block_entropy(segment: Segment, *, printed: bool = False) -> Float[Array, " k"]:
    """Return the entropy of each KV head over the visible blocks, 0 where there is none.

        p = softmax of the scaled scores,  h = -sum p log p / log(max(visible blocks, 2)), from 0 to 1

    `printed`: p of the unscaled scores, rounded to bfloat16, and -sum p log(p + 1e-9) in nats.
    """
    count = jnp.sum(segment.visible)
    if printed:
        share = jnp.exp(log_share(segment.score / segment.scale, segment.visible))
        share = share.astype(jnp.bfloat16).astype(jnp.float32)
        return -total(share * jnp.log(share + 1e-9))
    shares = log_share(segment.score, segment.visible)
    entropy = -total(jnp.where(segment.visible, jnp.exp(shares) * shares, 0.0))
    return entropy / jnp.log(jnp.maximum(count, 2).astype(jnp.float32))


def log_share(score: Float[Array, "k n"], visible: Bool[Array, " n"]) -> Float[Array, "k n"]:
    """Return the log of the softmax of the scores over the visible blocks, a very low value for the others."""
    return log_softmax(jnp.where(visible, score, jnp.finfo(jnp.float32).min))

"""Estimates of a prompt segment's attention from the summaries of earlier pages, before it is computed.

A segment is a run of prompt tokens whose queries share one list of blocks for each KV head.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.sums import log_softmax, total
from et_jax.types import pytree, static

HIGHEST = jax.lax.Precision.HIGHEST


@pytree
class Segment:
    """What a budget reads of one segment in one layer.

    `score` estimates the attention of each KV head's queries to a block (`observed`), times the model's `scale`, the
    1/sqrt(d) of its attention; `visible` masks the blocks entirely before the segment, of `block_size` tokens each.
    `layer` is the layer's number, `index` the number of earlier segments of the prompt.
    """

    score: Float[Array, "k n"]
    visible: Bool[Array, " n"]
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

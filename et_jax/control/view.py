"""What a selector may see of one sequence's blocks, and what may be guessed from it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.bounds import Interval
from et_jax.types import pytree


@pytree
class BlockView:
    """What is known of one sequence's blocks, for one layer and KV head, without reading them.

    `query` holds the group's queries, scaled so that query . key is the attention score; `score` bounds
    the scores of a block's keys by its box, and `middle` is that of its mean key.
    `value_radius` is the greatest distance of a value from the block's mean value. Blocks cover
    positions `start` to `start + num_tokens - 1`; `num_tokens` is 0 where the sequence holds no block,
    and where a sliding window hides part of one, for then its summary speaks of tokens nobody sees.
    `length` counts the sequence's tokens. `tolerance` is the attention mass that may be left unread.
    `coded` bounds the log of a block's attention mass by 8-bit copies of its keys (see
    `bounds.coded_mass`) and `mean_surprisal` is the mean of -log p of its tokens, both in nats; each is
    None unless the cache keeps what it is made of. A selector sees one view; `*b` is many at once.
    """

    query: Float[Array, "*b g d"]
    score: Interval
    middle: Float[Array, "*b g n"]
    key_min: Float[Array, "*b n d"]
    key_max: Float[Array, "*b n d"]
    key_mean: Float[Array, "*b n d"]
    value_mean: Float[Array, "*b n d"]
    value_radius: Float[Array, "*b n"]
    start: Int[Array, "*b n"]
    num_tokens: Int[Array, "*b n"]
    length: Int[Array, "*b"]
    tolerance: Float[Array, "*b"]
    coded: Interval | None = None
    mean_surprisal: Float[Array, "*b n"] | None = None


def log_mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the log of n e^{q . mean key}, a block's mass were its keys all alike; the least float if not held.

    By Jensen's inequality no block holds less.
    """
    held = view.num_tokens > 0
    log_count = jnp.log(jnp.maximum(view.num_tokens, 1).astype(jnp.float32))
    return jnp.where(held, log_count + view.middle, jnp.finfo(jnp.float32).min)


def mass(view: BlockView) -> Float[Array, "g n"]:
    """Return the estimated share of attention mass in each block, in [0, 1]."""
    return jax.nn.softmax(log_mass(view), axis=-1)


def held_values(view: BlockView) -> Float[Array, "n d"]:
    """Return each block's mean value in float32, 0 where none is held."""
    return jnp.where((view.num_tokens > 0)[:, None], view.value_mean.astype(jnp.float32), 0.0)

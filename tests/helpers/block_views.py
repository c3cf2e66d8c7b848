"""The blocks of a KV head's keys and values as a query sees them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control import bounds
from et_jax.control.view import BlockView


def blocks_at(
    query: Float[Array, "g d"],
    key: Float[Array, "t d"],
    value: Float[Array, "t d"],
    position: Int[Array, ""],
    page_size: int,
) -> BlockView:
    """Return the blocks that the query at `position` sees, in pages of `page_size` tokens, a divisor of t.

    `query` is scaled, so that query . key is the attention score.
    """
    key, value = (x.reshape(-1, page_size, x.shape[-1]) for x in (key, value))
    start = jnp.arange(key.shape[0], dtype=jnp.int32) * page_size
    held = start[:, None] + jnp.arange(page_size) <= position
    num_tokens = jnp.sum(held, axis=1, dtype=jnp.int32)
    counts, filled = held[..., None], (num_tokens > 0)[:, None]

    def mean(x: Array) -> Array:
        return jnp.sum(jnp.where(counts, x, 0.0), axis=1) / jnp.maximum(num_tokens, 1).astype(x.dtype)[:, None]

    def radius(x: Array) -> Array:
        return jnp.max(jnp.where(held, jnp.linalg.norm(x - mean(x)[:, None], axis=-1), 0.0), axis=1)

    scores = jnp.einsum("gd,nsd->gns", query, key, precision=jax.lax.Precision.HIGHEST)
    scores = jnp.where(held, scores, -jnp.inf)
    log_mass = jax.nn.logsumexp(scores, axis=-1)
    key_min = jnp.where(filled, jnp.min(jnp.where(counts, key, jnp.inf), axis=1), 0.0)
    key_max = jnp.where(filled, jnp.max(jnp.where(counts, key, -jnp.inf), axis=1), 0.0)
    return BlockView(
        query=query,
        score=bounds.box(query, key_min, key_max),
        middle=bounds.scores(query, mean(key)),
        key_min=key_min,
        key_max=key_max,
        key_mean=mean(key),
        value_mean=mean(value),
        value_radius=radius(value),
        start=start,
        num_tokens=num_tokens,
        length=position + 1,
        tolerance=jnp.float32(0.0),
        head_tolerance=jnp.zeros(query.shape[0]),
        tail_log_mass=log_mass[:, position // page_size],
    )

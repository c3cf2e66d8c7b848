"""One KV head with keys at random, its blocks, and the weight of every key in float64."""

import jax.numpy as jnp
import numpy as np

from et_jax.evidence.block_views import blocks_at

PAGE_SIZE, LENGTH, POSITION = 4, 32, 29


def head(seed=0, spread=3.0, group=1):
    """One KV head's scaled queries, keys and values."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=shape) for shape in ((group, 8), (LENGTH, 8), (LENGTH, 8)))
    return tuple(np.asarray(x, np.float32) for x in (query * spread / 8**0.5, key, value))


def blocks(query, key, value):
    return blocks_at(jnp.asarray(query), jnp.asarray(key), jnp.asarray(value), jnp.int32(POSITION), PAGE_SIZE)


def weights(query, key):
    """Return e^s of every key up to the position, in float64; 0 for those after it."""
    seen = np.exp(query.astype(np.float64) @ key.T.astype(np.float64))
    return np.where(np.arange(LENGTH) <= POSITION, seen, 0.0)

"""A model's own queries, keys and values, and each KV head's blocks as a query sees them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import bounds
from et_jax.control.view import BlockView
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params
from et_jax.models.transformer import Attend, forward
from et_jax.softmax import Softmax
from et_jax.tasks.calibration import require_plain_attention
from et_jax.types import pytree


@pytree
class CapturedBlocks:
    """One KV head's blocks up to one position, whole and summarised.

    `held` marks the tokens up to the position. `log_mass` is each block's true log Z in nats, -inf where
    a block holds nothing; `share` is its share of the whole mass, and `output` its part of attention's output.
    """

    view: BlockView
    key: Float[Array, "n s d"]
    held: Bool[Array, "n s"]
    log_mass: Float[Array, "g n"]
    share: Float[Array, "g n"]
    output: Float[Array, "g n d"]


def capturing(config: ModelConfig) -> Attend:
    """Return causal attention that appends each layer's rotated queries and keys and its values to `memory`."""

    def attend(layer: int, q: Array, k: Array, v: Array, memory: Any, softmax: Softmax) -> tuple[Array, Any]:
        b, t, h, d = q.shape
        grouped = q.reshape(b, t, config.num_kv_heads, config.group_size, d)
        scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k) * softmax.scale
        seen = jnp.arange(t)[:, None] >= jnp.arange(t)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(b, t, h, d), (*memory, (q, k, v))

    return attend


@partial(jax.jit, static_argnums=0)
def capture(config: ModelConfig, params: Params, tokens: Int[Array, " t"]) -> tuple[Array, tuple]:
    """Return the logits "t v" of one row, and each layer's (q "t h d", k "t k d", v "t k d").

    Raises ValueError for a model with sliding windows, of which a block would be seen in part, soft caps or sinks.
    """
    require_plain_attention(config)
    positions = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    with jax.default_matmul_precision("highest"):
        logits, layers = forward(params, config, tokens[None], positions[None], capturing(config), ())
    return logits[0], jax.tree.map(lambda x: x[0], layers)


def blocks_at(
    query: Float[Array, "g d"],
    key: Float[Array, "t d"],
    value: Float[Array, "t d"],
    position: Int[Array, ""],
    page_size: int,
) -> CapturedBlocks:
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
    log_mass, weights = jax.nn.logsumexp(scores, axis=-1), jax.nn.softmax(scores, axis=(1, 2))
    key_min = jnp.where(filled, jnp.min(jnp.where(counts, key, jnp.inf), axis=1), 0.0)
    key_max = jnp.where(filled, jnp.max(jnp.where(counts, key, -jnp.inf), axis=1), 0.0)
    view = BlockView(
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
    return CapturedBlocks(
        view=view,
        key=key,
        held=held,
        log_mass=log_mass,
        share=jnp.sum(weights, axis=-1),
        output=jnp.einsum("gns,nsd->gnd", weights, value, precision=jax.lax.Precision.HIGHEST),
    )


def key_radius(blocks: CapturedBlocks) -> Float[Array, " n"]:
    """Return the greatest distance of a key held from its block's mean key, 0 where none is held."""
    apart = jnp.linalg.norm(blocks.key - blocks.view.key_mean[:, None], axis=-1)
    return jnp.max(jnp.where(blocks.held, apart, 0.0), axis=1)

"""The model that training is compared with: plain attention over all heads and rows at once, in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from et_jax.models.transformer import forward


def plain_attention(q, k, v, segments, window=None):
    """Causal attention as its formula has it, within segments and a window."""
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.float32(q.shape[-1]))
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])
    past = (behind >= 0) & (behind < (window or q.shape[1]))
    seen = past & (segments[:, :, None] == segments[:, None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def plain_pass(params, config, inputs, segments=None) -> Any:
    """The logits at every position, by weights of one layer each."""
    segments = jnp.zeros(inputs.shape, jnp.int32) if segments is None else segments

    def attend(layer, q, k, v, memory, softmax):
        return plain_attention(q, k, v, segments, config.windows[layer]), memory

    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    return forward(params, config, inputs, positions, attend, None)[0]

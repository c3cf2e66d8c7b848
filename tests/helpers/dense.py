"""The plain program that others are held to: full attention over the whole sequence, no cache."""

import functools

import jax
import jax.numpy as jnp
from stored_tokens import as_stored

from et_jax.models.transformer import forward


def dense_attend(config, cache_dtype=jnp.float32):
    """Causal attention over the sequence itself, in a layer's window: softmax(cap(scale q k)) v, sinks in the sum.

    k and v are what a cache of this dtype holds.
    """

    def attend(layer, q, k, v, memory, softmax):
        b, t, h, d = q.shape
        k, v = (as_stored(x, cache_dtype).astype(x.dtype) for x in (k, v))
        q = q.reshape(b, t, config.num_kv_heads, config.group_size, d)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * softmax.scale
        if softmax.soft_cap is not None:
            scores = softmax.soft_cap * jnp.tanh(scores / softmax.soft_cap)
        distance = jnp.arange(t)[:, None] - jnp.arange(t)[None, :]
        window = config.windows[layer]
        kept_mask = (distance >= 0) & (distance < (t if window is None else window))
        scores = jnp.where(kept_mask, scores, -jnp.inf)
        if softmax.sink_logits is not None:  # one more token, which has no value
            sink = softmax.sink_logits.astype(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores)[..., :t]
        return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(b, t, h, d), memory

    return attend


def dense_logits(config, params, tokens, cache_dtype=jnp.float32):
    """Logits at every position of `tokens` "b t", multiplied at the highest precision."""
    return dense_pass(config, params, tokens, None, None, cache_dtype)[0]


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def dense_pass(config, params, tokens, memory, mix=None, cache_dtype=jnp.float32):
    """The same, and the memory that `mix` leaves."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    with jax.default_matmul_precision("highest"):
        return forward(params, config, tokens, positions, dense_attend(config, cache_dtype), memory, mix)

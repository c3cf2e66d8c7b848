"""The plain program that others are held to: full attention over the whole sequence, no cache; what a cache holds."""

import functools

import jax
import jax.numpy as jnp

from et_jax.models.transformer import forward

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def as_stored(x, dtype):
    """Return `x`, whose last axis is a key or a value, as it is read from a cache of this dtype.

    In 8 bits, c = x / scale rounded to the nearest with scale = max |x| / largest; read as c scale in float32.
    """
    name = jnp.dtype(dtype).name
    if name not in LARGEST:
        return x.astype(dtype).astype(x.dtype)
    x = x.astype(jnp.float32)
    scale = jnp.abs(x).max(-1, keepdims=True) / LARGEST[name]
    code = jnp.where(scale == 0, 0.0, x / scale)
    code = jnp.round(code) if name == "int8" else code
    return code.astype(dtype).astype(jnp.float32) * scale


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

"""Language models written as flax.nnx modules, as a caller may bring them, and their own greedy text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

LENGTH = 96  # tokens that each of them reads at most
WIDTH = 32
jitted: Any = nnx.jit  # which know no methods
remade: Any = nnx.remat


class Plain(nnx.Module):
    """`nnx.MultiHeadAttention` with dropout, learned positions, and an embedding that is the head too."""

    def __init__(self, vocab_size: int, *, num_layers: int = 2, dtype=jnp.float32, rngs: nnx.Rngs, **attention):
        kind = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(vocab_size, WIDTH, **kind)
        self.place = nnx.Embed(LENGTH, WIDTH, **kind)
        self.norm = nnx.RMSNorm(WIDTH, **kind)
        settings = {"num_heads": 4, "in_features": WIDTH, "decode": False, "dropout_rate": 0.3} | kind | attention
        self.attention = nnx.List([nnx.MultiHeadAttention(**settings) for _ in range(num_layers)])
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, **kind), nnx.Linear(2 * WIDTH, WIDTH, **kind)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, tokens, positions):
        x = self.embed(tokens) + self.place(positions)
        for layer in self.attention:
            x = x + self.drop(layer(self.norm(x), mask=nnx.make_causal_mask(tokens)))
            x = x + self.down(jax.nn.gelu(self.up(self.norm(x))))
        return self.embed.attend(self.norm(x))


def causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class Grouped(nnx.Module):
    """Attention written by hand: two query heads to a KV head, rotary positions, `attention_fn` one of the caller's."""

    class Layer(nnx.Module):
        def __init__(self, *, attention_fn=causal, rngs: nnx.Rngs):
            self.q = nnx.LinearGeneral(WIDTH, (4, 8), use_bias=False, rngs=rngs)
            self.k = nnx.LinearGeneral(WIDTH, (2, 8), use_bias=False, rngs=rngs)
            self.v = nnx.LinearGeneral(WIDTH, (2, 8), use_bias=False, rngs=rngs)
            self.o = nnx.LinearGeneral((4, 8), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)
            self.attention_fn = attention_fn

        def __call__(self, x, positions):
            q, k = (turned(part(x), positions) for part in (self.q, self.k))
            return self.o(self.attention_fn(q, k, self.v(x)))

    def __init__(self, vocab_size: int, *, num_layers: int = 2, attention_fn=causal, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.layers = nnx.List([self.Layer(attention_fn=attention_fn, rngs=rngs) for _ in range(num_layers)])
        self.head = nnx.Linear(WIDTH, vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions):
        x = 8.0 * self.embed(tokens)
        for layer in self.layers:
            x = x + layer(self.norm(x), positions)
        return self.head(self.norm(x))


class Wrapped(Grouped):
    """A layer under each of the transforms that training wraps layers in, the second of them called twice."""

    class Remade(Grouped.Layer):
        @remade
        def __call__(self, x, positions):
            return Grouped.Layer.__call__(self, x, positions)

    class Jitted(Grouped.Layer):
        @jitted
        def __call__(self, x, positions):
            return Grouped.Layer.__call__(self, x, positions)

    def __init__(self, vocab_size: int, *, rngs: nnx.Rngs):
        super().__init__(vocab_size, num_layers=1, rngs=rngs)
        twice = self.Jitted(rngs=rngs)
        self.layers = nnx.List([self.layers[0], self.Remade(rngs=rngs), twice, twice])

    @jitted
    def normed(self, x):
        return self.norm(x)

    def __call__(self, tokens, positions):
        x = 8.0 * self.embed(tokens)
        for layer in self.layers[1:]:
            x = x + layer(self.normed(x), positions)
        last = jax.jit(jax.checkpoint(lambda x: x + jax.nn.silu(self.layers[0](self.norm(x), positions))))
        return self.head(self.normed(last(x)))


def turned(x, positions):
    """Rotary positions, channel i paired with its neighbour."""
    pairs = x.shape[-1] // 2
    angle = positions[..., None, None].astype(jnp.float32) * 1000.0 ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
    one, other = x[..., ::2], x[..., 1::2]
    rotated = one * jnp.cos(angle) - other * jnp.sin(angle), one * jnp.sin(angle) + other * jnp.cos(angle)
    return jnp.stack(rotated, axis=-1).reshape(x.shape)


def own_logits(module, tokens) -> np.ndarray:
    """What the module itself says of each token of a text, in one pass without dropout."""
    quiet = nnx.clone(module)
    quiet.eval()
    graphdef, state = nnx.split(quiet)
    padded = jnp.asarray([[*tokens] + [0] * (LENGTH - len(tokens))])

    def run(state, tokens):
        return nnx.merge(graphdef, state)(tokens, jnp.arange(LENGTH)[None])

    return np.asarray(jax.jit(run)(state, padded)[0, : len(tokens)], np.float32)

"""Compressions compared on given text: what a model predicts after its cache forgot what each of them leaves out.

A text is read densely up to a point; there every layer and KV head keeps what its compression says, by the very code of
the decoder, and the rest of the text is read with that and with what came since. All tokens after the point are met at
once: a token's keys and values depend on the tokens before it and on what they read, layer by layer.
"""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.compression import Compression, kept
from et_jax.control.policies import Entries, Latent, attention_mass
from et_jax.models.config import ModelConfig
from et_jax.models.params import Params
from et_jax.models.transformer import forward
from et_jax.softmax import Softmax
from et_jax.tasks.calibration import require_plain_attention
from et_jax.types import pytree

_TEXTS = 4  # read at a time


@dataclasses.dataclass(frozen=True)
class HeavyHitters(Latent):
    """Keeps what all queries so far attended to the most, and the last `recent` entries (H2O, Zhang et al. 2023).

    It is given the queries of every token. A decoder cannot serve it: that is as much as the cache itself, and its
    kernels never write out how much a query attends to each entry.
    """

    recent: int = 0

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return the mean attention mass, and more than any for the recent entries."""
        place = jnp.arange(entries.keys.shape[1])
        return jnp.where(place >= entries.count - self.recent, 2.0, attention_mass(entries))


@dataclasses.dataclass(frozen=True)
class Oracle(Latent):
    """Keeps what the queries to come attend to the most. It is given those, which no policy of a decoder can be."""

    def score(self, entries: Entries, window: int, pooling: int) -> Float[Array, "k n"]:
        """Return the mean attention mass."""
        return attention_mass(entries)


@pytree
class Texts:
    """Rows of tokens, and what dense reading made of them: "*r t". Of each layer queries and keys rotated, and values.

    `log_probs` are those after every token, in nats. `*r` is none where one row is spoken of.
    """

    token: Int[Array, "*r t"]
    queries: tuple[Float[Array, "*r t h d"], ...]
    keys: tuple[Float[Array, "*r t k d"], ...]
    values: tuple[Float[Array, "*r t k d"], ...]
    log_probs: Float[Array, "*r t v"]


@pytree
class Continued:
    """What follows a compression: the log-probabilities after each token read since, and the entries each head kept."""

    log_probs: Float[Array, "*r u v"]
    entries: Int[Array, "*r l k"]


@partial(jax.jit, static_argnames="config")
def texts(config: ModelConfig, params: Params, tokens: Int[Array, "r t"]) -> Texts:
    """Return rows, read densely. Raises ValueError for a model with sliding windows, soft caps or sinks."""
    require_plain_attention(config)

    def dense(layer: int, q: Array, k: Array, v: Array, memory: Any, softmax: Softmax) -> tuple[Array, Any]:
        return jax.nn.dot_product_attention(q, k, v, scale=softmax.scale, is_causal=True), (*memory, (q[0], k[0], v[0]))

    def one(row: Int[Array, " t"]) -> Texts:
        with jax.default_matmul_precision("highest"):
            logits, layers = forward(params, config, row[None], jnp.arange(row.shape[0])[None], dense, ())
        queries, keys, values = zip(*layers, strict=True)
        return Texts(token=row, queries=queries, keys=keys, values=values, log_probs=jax.nn.log_softmax(logits[0]))

    return jax.lax.map(one, tokens)


@partial(jax.jit, static_argnames=("config", "how", "count", "page_size"))
def continued(
    config: ModelConfig,
    params: Params,
    text: Texts,
    at: Int[Array, " r"],
    end: Int[Array, " r"],
    how: Compression,
    *,
    count: int,
    page_size: int,
) -> Continued:
    """Return what follows in each row of `end` tokens once the first `at` are compressed: `count` tokens.

    What is said of those past the end means nothing.
    """
    layout = how.layout(page_size, config.windows)
    room = layout.region * page_size

    def one(given: tuple[Texts, Array, Array]) -> Continued:
        row, at, end = given
        length = row.token.shape[0]
        place = at + jnp.arange(count, dtype=jnp.int32)

        def attend(layer: int, q: Array, k: Array, v: Array, memory: Any, softmax: Softmax) -> tuple[Array, Any]:
            old = jnp.broadcast_to(jnp.arange(length) < at, (config.num_kv_heads, length))
            if room < length:  # a text that fits is left alone
                entries = _entries(config, how, row, at, layer, q[0], place < end)
                chosen = kept(entries, how, layout, page_size)
                head = jnp.arange(config.num_kv_heads)[:, None]
                less = jnp.zeros_like(old).at[head, jnp.where(chosen < 0, length, chosen)].set(True)
                old = jnp.where(at > room, less, old)
            keys, values = (jnp.concatenate([x[layer], new[0]]) for x, new in ((row.keys, k), (row.values, v)))
            causal = jnp.tril(jnp.ones((count, count), bool))
            reads = [jnp.broadcast_to(x, (config.num_kv_heads, count, x.shape[-1])) for x in (old[:, None], causal)]
            out = _mixed(softmax, q[0], keys, values, jnp.concatenate(reads, axis=-1))
            return out[None], (*memory, jnp.sum(old, axis=1, dtype=jnp.int32))

        token = row.token[jnp.minimum(place, length - 1)]
        nothing: tuple[Any, ...] = ()
        with jax.default_matmul_precision("highest"):
            logits, held = forward(params, config, token[None], place[None], attend, nothing)
        return Continued(log_probs=jax.nn.log_softmax(logits[0]), entries=jnp.stack(held))

    return jax.lax.map(one, (text, at, end))


@dataclasses.dataclass(frozen=True)
class Way:
    """A compression of each text at a token of its own, `count` tokens read on, and judged from the `judged`-th on."""

    how: Compression
    at: Int[np.ndarray, " q"]
    count: int
    judged: int = 0


def read_on(
    config: ModelConfig,
    params: Params,
    tokens: Int[np.ndarray, "q t"],
    end: Int[np.ndarray, " q"],
    ways: dict[Any, Way],
    page_size: int,
) -> Iterator[tuple[slice, Texts, Iterator[tuple[Any, Continued]]]]:
    """Yield some texts at a time: which, what dense reading makes of them, and by name what follows in each way."""
    for begin in range(0, len(tokens), _TEXTS):
        part = slice(begin, begin + _TEXTS)
        dense = texts(config, params, jnp.asarray(tokens[part]))

        def follow(part: slice = part, dense: Texts = dense) -> Iterator[tuple[Any, Continued]]:
            for name, way in ways.items():
                points = jnp.asarray(way.at[part]), jnp.asarray(end[part])
                sizes = {"count": way.count, "page_size": page_size}
                yield name, continued(config, params, dense, *points, way.how, **sizes)

        yield part, dense, follow()


def _entries(
    config: ModelConfig,
    how: Compression,
    row: Texts,
    at: Int[Array, ""],
    layer: int,
    following: Float[Array, "u h d"],
    there: Bool[Array, " u"],
) -> Entries:
    """What a policy sees of a layer at a point, `following` being the queries from there on, where they are `there`."""
    queries, length = row.queries[layer], row.token.shape[0]
    if isinstance(how.policy, Oracle):
        queries, places = following, jnp.where(there, length, 0)  # one that is not there sees the first entry alone
    elif isinstance(how.policy, HeavyHitters):
        token = jnp.arange(length, dtype=jnp.int32)
        places = jnp.where(token < at, token, 0)  # likewise
    else:
        places = at - how.window + jnp.arange(how.window, dtype=jnp.int32)
        queries = queries[places]
    heads = jnp.zeros(config.num_kv_heads, jnp.int32)
    keys = row.keys[layer].swapaxes(0, 1)
    return Entries(
        keys=keys, first=heads, count=at, queries=queries, at=places, softmax=config.softmax(layer), layer=layer
    )


def _mixed(
    softmax: Softmax,
    q: Float[Array, "u h d"],
    keys: Float[Array, "n k d"],
    values: Float[Array, "n k d"],
    reads: Bool[Array, "k u n"],
) -> Float[Array, "u h d"]:
    """Attention of every token to the entries that its KV head `reads`."""
    grouped = q.reshape(len(q), keys.shape[1], -1, q.shape[2])
    scores = jnp.einsum("ukgd,nkd->kgun", grouped, keys) * softmax.scale
    weights = jax.nn.softmax(jnp.where(reads[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgun,nkd->ukgd", weights, values).reshape(q.shape)

"""What a model would draft for itself, token by token along a text, by what its drafts read.

The model reads a text once, whole. Then it reads it again, every token as a draft's first one is read: over the keys
and values of the first reading, and of those in the blocks alone that a reader lists, beside the token's own. The
blocks are chosen at the token before, as in decoding; a longer draft goes on with them, and with its own keys, so that
its later tokens hold less often than a first one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.base import unpack_blocks
from et_jax.control.entropy import entropy, moments
from et_jax.decode.draft import Pruned
from et_jax.decode.pruned import heavy_blocks, log_shares
from et_jax.evidence.coupling import keys, sampled
from et_jax.evidence.walks import Written
from et_jax.models.model import forward
from et_jax.serve.engine import Model
from et_jax.softmax import Softmax
from et_jax.types import pytree

PAGE = 16

Listed = Callable[[Pruned, Float[Array, "t h n"], Int[Array, " t"], int], Bool[Array, "t k n"]]
"""From the share of mass of every query head on every block, the blocks held, and KV heads to the blocks to read."""


@pytree
class Layer:
    """What the first reading of a layer leaves: keys, values, and every query head's share of mass on each block."""

    k: Float[Array, "t k d"]
    v: Float[Array, "t k d"]
    share: Float[Array, "t h n"]


def by_mass(
    how: Pruned, share: Float[Array, "t h n"], held: Int[Array, " t"], num_kv_heads: int
) -> Bool[Array, "t k n"]:
    """Return the blocks that decoding would list: those that held the mass at the token before."""
    before = jnp.concatenate([share[:1], share[:-1]])
    chosen = heavy_blocks(how, log_shares(jnp.log(before), num_kv_heads)[:, None], held)
    return unpack_blocks(chosen)[:, 0, :, : share.shape[2]]


def by_own_mass(
    how: Pruned, share: Float[Array, "t h n"], held: Int[Array, " t"], num_kv_heads: int
) -> Bool[Array, "t k n"]:
    """Return those that hold the mass at the token itself, which nobody knows in time."""
    chosen = heavy_blocks(how, log_shares(jnp.log(share), num_kv_heads)[:, None], held)
    return unpack_blocks(chosen)[:, 0, :, : share.shape[2]]


def latest(
    how: Pruned, share: Float[Array, "t h n"], held: Int[Array, " t"], num_kv_heads: int
) -> Bool[Array, "t k n"]:
    """Return the latest blocks, as many as may be chosen."""
    block, most = jnp.arange(share.shape[2]), jnp.ceil(how.share * held.astype(jnp.float32)).astype(jnp.int32)
    recent = (block >= held[:, None] - most[:, None]) & (block < held[:, None])
    return jnp.broadcast_to(recent[:, None], (len(share), num_kv_heads, share.shape[2]))


READERS: dict[str, tuple[Listed, bool]] = {
    "mass at the token before": (by_mass, False),
    "the same, means for the rest": (by_mass, True),
    "the latest": (latest, False),
    "mass at the token itself": (by_own_mass, False),
}
"""By name what is listed, and whether each block that is not counts as the mean of its values, by its share before."""


def _attention(
    q: Float[Array, "t k g d"], k: Float[Array, "t k d"], softmax: Softmax, seen: Bool[Array, "t k u"]
) -> Float[Array, "t k g u"]:
    """Scores of every token's queries with all keys, -inf where a key is not seen."""
    scores = jnp.einsum("tkgd,ukd->tkgu", q, k).astype(jnp.float32) * softmax.scale
    return jnp.where(seen[:, :, None], scores, -jnp.inf)


def _seen(length: int, softmax: Softmax) -> Bool[Array, "t u"]:
    place = jnp.arange(length)
    seen = place <= place[:, None]
    return seen if softmax.window is None else seen & (place > place[:, None] - softmax.window)


@partial(jax.jit, static_argnums=1)
def read_whole(params: Any, config: Any, tokens: Int[Array, " t"]) -> tuple[Float[Array, "t v"], tuple[Layer, ...]]:
    """Return the logits after every token of a text, and what its reading leaves."""
    length, positions = len(tokens), jnp.arange(len(tokens), dtype=jnp.int32)[None]
    blocks = -(-length // PAGE)

    def attend(layer: int, q: Array, k: Array, v: Array, memory: tuple, softmax: Softmax) -> tuple[Array, tuple]:
        grouped = q[0].reshape(length, k.shape[2], -1, q.shape[-1])
        seen = jnp.broadcast_to(_seen(length, softmax)[:, None], (length, k.shape[2], length))
        weight = jax.nn.softmax(_attention(grouped, k[0], softmax, seen), axis=-1)
        out = jnp.einsum("tkgu,ukd->tkgd", weight, v[0].astype(jnp.float32)).astype(q.dtype)
        each = jnp.pad(weight, ((0, 0), (0, 0), (0, 0), (0, blocks * PAGE - length)))
        share = each.reshape(length, q.shape[2], blocks, PAGE).sum(axis=-1)
        return out.reshape(q.shape), (*memory, Layer(k=k[0], v=v[0], share=share))

    logits, layers = forward(params, config, tokens[None], positions, attend, ())
    return logits[0], layers


@partial(jax.jit, static_argnums=(1, 2, 3))
def read_few(
    params: Any, config: Any, how: Pruned, reader: str, tokens: Int[Array, " t"], layers: tuple[Layer, ...]
) -> Float[Array, "t v"]:
    """Return the logits after every token of a text, each read as the first token of a draft is."""
    length, place = len(tokens), jnp.arange(len(tokens), dtype=jnp.int32)
    listed, means = READERS[reader]
    blocks = -(-length // PAGE)
    block, held = jnp.arange(blocks), place // PAGE + 1

    def attend(layer: int, q: Array, k: Array, v: Array, memory: None, softmax: Softmax) -> tuple[Array, None]:
        known, heads = layers[layer], k.shape[2]
        grouped = q[0].reshape(length, heads, -1, q.shape[-1])
        opened = listed(how, known.share, held, heads) | (block == 0)
        opened |= (block >= jnp.maximum(place - 1, 0)[:, None, None] // PAGE) | (softmax.window is not None)
        seen = jnp.repeat(opened, PAGE, axis=-1)[..., :length] & _seen(length, softmax)[:, None]
        scores = _attention(grouped, known.k, softmax, seen)
        own = jnp.einsum("tkgd,tkd->tkg", grouped, k[0]).astype(jnp.float32) * softmax.scale
        itself = (place == place[:, None])[:, None, None]
        weight = jax.nn.softmax(jnp.where(itself, own[..., None], scores), axis=-1)
        of_itself = jnp.einsum("tkgt->tkg", weight)
        out = jnp.einsum("tkgu,ukd->tkgd", jnp.where(itself, 0.0, weight), known.v.astype(jnp.float32))
        out += of_itself[..., None] * v[0].astype(jnp.float32)[:, :, None]
        if means:
            before = jnp.concatenate([known.share[:1], known.share[:-1]]).reshape(length, heads, -1, blocks)
            whole = (block < place[:, None] // PAGE)[:, None, None] & ~opened[:, :, None]
            rest = jnp.where(whole, before, 0.0)
            padded = jnp.pad(known.v.astype(jnp.float32), ((0, blocks * PAGE - length), (0, 0), (0, 0)))
            mean = padded.reshape(blocks, PAGE, heads, -1).mean(axis=1)
            out = out * (1.0 - rest.sum(axis=-1))[..., None] + jnp.einsum("tkgn,nkd->tkgd", rest, mean)
        return out.astype(q.dtype).reshape(q.shape), None

    return forward(params, config, tokens[None], place[None], attend, None)[0][0]


def drafted(
    model: Model,
    rows: Int[np.ndarray, "r t"],
    first: int,
    temperature: float,
    readers: Sequence[tuple[str, float]],
) -> dict[tuple[str, float], Written]:
    """Return where a draft's first token would be the text's, from token `first` of every row on, by reader and share.

    The rows are texts of the model, sampled with the seeds of their numbers. The drafter's entropy is that of the model
    as it drafts.
    """
    position, heat = jnp.arange(first, rows.shape[1], dtype=jnp.int32), jnp.float32(temperature)
    guessed: dict[tuple[str, float], list[tuple[np.ndarray, np.ndarray]]] = {reader: [] for reader in readers}
    again, told = [], []

    def said(logits: Float[Array, "t v"], seed: int) -> tuple[np.ndarray, np.ndarray]:
        cut = logits[first - 1 : -1]
        token = sampled(cut, heat, keys(np.full(len(position), seed)), position)
        return np.asarray(token) == rows[seed, first:], np.asarray(entropy(moments(cut)), np.float64)

    for seed, row in enumerate(rows):
        tokens = jnp.asarray(row, jnp.int32)
        whole, layers = read_whole(model.params, model.config, tokens)
        for known, found in zip((again, told), said(whole, seed), strict=True):
            known.append(found)
        for name, share in readers:
            few = read_few(model.params, model.config, Pruned(share=share), name, tokens, layers)
            guessed[name, share].append(said(few, seed))
    return {
        reader: Written(
            hits=np.array([hits for hits, _ in each]),
            told=np.array(told),
            entropy=np.array([uncertain for _, uncertain in each]),
            reproduced=float(np.mean(again)),
            circles=0,
        )
        for reader, each in guessed.items()
    }

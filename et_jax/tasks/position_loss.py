"""The loss of a text by position, computed with the decoder's own step."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from et_jax.decode.decoder import Decoder
from et_jax.decode.plant import Weights
from et_jax.decode.request import request
from et_jax.errors import UsageError
from et_jax.scope import own_settings
from et_jax.types import replace


def rows(ids: Sequence[int], first: int | None, length: int, count: int) -> Integer[np.ndarray, "b t"]:
    """Return `count` rows of `length` tokens, evenly spread over a text, each after `first` unless that is None."""
    taken = length if first is None else length - 1
    if len(ids) < taken * count:
        raise UsageError(
            f"The text has {len(ids)} tokens and {count} rows of {length} were asked for; give a longer text, or "
            "ask for fewer samples or a smaller length."
        )
    starts = np.linspace(0, len(ids) - taken, count).astype(int)
    cut = np.asarray(ids)[starts[:, None] + np.arange(taken)]
    return cut if first is None else np.pad(cut, ((0, 0), (1, 0)), constant_values=first)


@own_settings()
def position_losses(decoder: Decoder, weights: Weights, tokens: Integer[np.ndarray, "b t"]) -> Float[np.ndarray, "b u"]:
    """Return -log p of every token but the first of each row given those before it, nats.

    Every token passes one by one through the decoder's own step, so that its selector chooses the
    blocks; as many rows as it has slots run at a time. It must keep the logits
    (`DecoderConfig.keep`). A decoder with compression compresses as for a prompt of one token.
    """
    slots = decoder.config.num_slots
    parts = []
    for begin in range(0, len(tokens), slots):
        some = tokens[begin : begin + slots]
        padded = np.concatenate([some, np.repeat(some[-1:], slots - len(some), axis=0)])
        parts.append(_losses(decoder, weights, padded)[: len(some)])
    return np.concatenate(parts)


def _losses(decoder: Decoder, weights: Weights, tokens: np.ndarray) -> np.ndarray:
    state = decoder.empty()
    for slot, row in enumerate(tokens):
        asked = request(decoder.config, [int(row[0])], limit=2**30, temperature=0.0, arrival=slot)
        state = decoder.insert(state, slot, asked)
    found, due = [], _points(decoder, tokens.shape[1])
    for num_cached, column in enumerate(tokens.T[1:]):
        for slot in range(len(tokens)) if num_cached in due else ():
            state, _ = decoder.compress(state, slot)
        state, output = decoder.step(weights, state)
        if not output.produced.all():
            raise ValueError("decoder: got a pool without pages for all rows, wanted one with enough for all of them")
        if state.logits is None:
            raise ValueError("decoder: got one that keeps no logits, wanted keep={'logits'}")
        logits = np.asarray(state.logits, np.float64)
        top = logits.max(axis=1)
        normaliser = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
        found.append(normaliser - logits[np.arange(len(column)), column])
        state = replace(state, token=jnp.asarray(column, jnp.int32))
    return np.stack(found, axis=1)


def _points(decoder: Decoder, length: int) -> set[int]:
    """Return the numbers of cached tokens at which sequences of one prompt token are compressed, up to a length."""
    how, layout = decoder.config.compression, decoder.config.layout
    points: set[int] = set()
    if how is None or layout is None:
        return points
    room, shift = layout.region * decoder.config.page_size, 0
    while (point := how.point(1, shift, room)) is not None and point < length:
        points.add(point)
        shift = point - room
    return points


def by_position(losses: Float[np.ndarray, "b u"], num_buckets: int = 8) -> dict[tuple[int, int], float]:
    """Return the mean loss between positions, in stretches that double in length."""
    length = losses.shape[1] + 1
    edges = [1, *(length >> shift for shift in range(num_buckets - 1, 0, -1) if length >> shift > 1), length]
    return {(begin, end): float(losses[:, begin - 1 : end - 1].mean()) for begin, end in itertools.pairwise(edges)}

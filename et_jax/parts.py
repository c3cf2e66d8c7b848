"""Prompts cut into parts, and parts of several prompts side by side: what one call of `decode.prefill` takes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from et_jax.state import DecoderConfig

Rows = tuple[np.ndarray[Any, np.dtype[np.int32]], ...]


def numbers(config: DecoderConfig) -> tuple[int, ...]:
    """Return how many parts a call may take: powers of two, and as many as a chunk holds."""
    most = config.chunk // config.part
    return (*(2**i for i in range((most - 1).bit_length())), most)


def arrays(config: DecoderConfig, rows: Sequence[tuple[int, Sequence[int]]], number: int) -> Rows:
    """Return `slot`, `tokens` and `count` of `number` parts for `decode.prefill`; those beyond `rows` are empty.

    `rows` are slots and at most `config.part` tokens for each.
    """
    slot, count = np.zeros((2, number), np.int32)
    tokens = np.zeros((number, config.part), np.int32)
    for i, (owner, part) in enumerate(rows):
        slot[i], count[i] = owner, len(part)
        tokens[i, : len(part)] = part
    return slot, tokens, count


def cut(config: DecoderConfig, slot: int, prompt: Sequence[int]) -> Rows:
    """Return what `decode.prefill` takes to write the whole of `prompt` into `slot` in one call."""
    starts = range(0, len(prompt), config.part)
    rows = [(slot, prompt[at : at + config.part]) for at in starts]
    return arrays(config, rows, max(1, len(rows)))

"""Prompts cut into parts, and parts of several prompts side by side: what a call of `decode.prefill` takes.

Every call takes as many parts as fill a chunk, some of them empty: another number of rows would be another
program, and the last bit of a sum over a row may differ between two programs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from et_jax.decode.state import DecoderConfig

Rows = tuple[np.ndarray[Any, np.dtype[np.int32]], ...]


def most(config: DecoderConfig) -> int:
    """Return how many parts a call takes."""
    return config.chunk // config.part


def call(config: DecoderConfig, parts: Sequence[tuple[int, Sequence[int]]]) -> Rows:
    """Return `slot`, `tokens` and `count` for `decode.prefill`.

    `parts` are slots and at most `config.part` tokens for each, at most as many as a call takes.
    """
    slot, count = np.zeros((2, most(config)), np.int32)
    tokens = np.zeros((most(config), config.part), np.int32)
    for i, (owner, part) in enumerate(parts):
        slot[i], count[i] = owner, len(part)
        tokens[i, : len(part)] = part
    return slot, tokens, count


def cut(config: DecoderConfig, prompt: list[int]) -> list[list[int]]:
    """Return the parts of a prompt."""
    return [prompt[at : at + config.part] for at in range(0, len(prompt), config.part)]


def calls(config: DecoderConfig, slot: int, prompt: list[int]) -> Iterator[Rows]:
    """Yield what `decode.prefill` takes, call by call, to write a prompt into a slot."""
    for at in range(0, len(prompt), config.chunk):
        yield call(config, [(slot, part) for part in cut(config, prompt[at : at + config.chunk])])

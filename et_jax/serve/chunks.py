"""Cuts prompts into chunks, and packs chunks of several prompts into the arguments of a `decode.prefill` call.

Every call has as many chunks as fill a prefill batch, some of them empty. A different number of rows would be a
different program, and two programs may differ in the last bit of a sum over a row.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from et_jax.decode.config import DecoderConfig

PackedRows = tuple[np.ndarray[Any, np.dtype[Any]], ...]


def rows_per_call(config: DecoderConfig) -> int:
    """Return the number of chunks per call."""
    return config.prefill_batch // config.chunk


def pack(config: DecoderConfig, chunks: Sequence[tuple[int, Sequence[int]]], ends: Collection[int] = ()) -> PackedRows:
    """Return `slot`, `tokens`, `count` and `last` for `decode.prefill`.

    `chunks` are slots with at most `config.chunk` tokens each, at most `rows_per_call` of them. The prompts of the
    slots `ends` end with their last chunk here.
    """
    slot, count = np.zeros((2, rows_per_call(config)), np.int32)
    tokens = np.zeros((rows_per_call(config), config.chunk), np.int32)
    for i, (owner, chunk) in enumerate(chunks):
        slot[i], count[i] = owner, len(chunk)
        tokens[i, : len(chunk)] = chunk
    final = {owner: i for i, (owner, _) in enumerate(chunks) if owner in ends}
    last = np.zeros(rows_per_call(config), bool)
    last[list(final.values())] = True
    return slot, tokens, count, last


def split(config: DecoderConfig, prompt: list[int]) -> list[list[int]]:
    """Return the chunks of a prompt."""
    return [prompt[at : at + config.chunk] for at in range(0, len(prompt), config.chunk)]


def next_call(config: DecoderConfig, prompts: Iterable[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
    """Return the next call's chunks, as `pack` takes them, cut from `prompts` (slot and tokens) in order."""
    cut = ((slot, chunk) for slot, prompt in prompts for chunk in split(config, prompt))
    return list(itertools.islice(cut, rows_per_call(config)))


def calls(config: DecoderConfig, slot: int, prompt: list[int]) -> Iterator[PackedRows]:
    """Yield the arguments of each `decode.prefill` call that writes a prompt into a slot."""
    for at in range(0, len(prompt), config.prefill_batch):
        part = split(config, prompt[at : at + config.prefill_batch])
        ends = (slot,) if at + config.prefill_batch >= len(prompt) else ()
        yield pack(config, [(slot, chunk) for chunk in part], ends)

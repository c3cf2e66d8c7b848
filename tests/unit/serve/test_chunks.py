"""Prompts cut into chunks: what a call takes, and that company in a call changes no bit of what is cached."""

import functools

import jax
import numpy as np
import pytest
from small_model import PAGE, PROMPTS, configuration, prompt, same_bits, weights

from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.control.select import SinksWindow
from et_jax.decode import decoder as decoding
from et_jax.serve import chunks

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LONG = prompt(3, 22)  # five chunks of a page and one of two tokens


@functools.cache
def decoder() -> decoding.Decoder:
    """One that keeps all it can of a page: summaries, codes and surprisals."""
    controller = Controller(law=chain(), selector=SinksWindow(2, 6))
    keep = frozenset({"codes", "surprisals"})
    config = configuration(chunk=PAGE, prefill_batch=16 * PAGE, controller=controller, keep=keep)
    return decoding.decoder(config)


def prefilled(state, rows: list[tuple[int, list[int]]]):
    """The state after one call, in which the prompts of slots stand as they are cut, and which were granted pages."""
    d = decoder()
    each = [(slot, chunk) for slot, tokens in rows for chunk in chunks.split(d.config, tokens)]
    state, granted = d.prefill((weights(),), state, *chunks.pack(d.config, each))
    return state, granted[: len(each)]


def filled(calls: list[list[tuple[int, list[int]]]]):
    """The state after these calls."""
    state = decoder().empty()
    for rows in calls:
        state, granted = prefilled(state, rows)
        assert granted.all()
    return state


def cached(state, slot: int):
    """All that is cached of a slot, token by token and page by page."""
    length = int(state.length[slot])
    held = np.asarray(state.table.pages)[slot, : -(-length // PAGE)]
    pages = jax.tree.map(lambda x: x[:, held], state.plants[0].cache.layers)
    tokens = [layer.pages.reshape(layer.pages.shape[0], -1, layer.pages.shape[-1])[:, :length] for layer in pages]
    summaries = [(layer.summary, layer.key_codes) for layer in pages]
    return length, tokens, summaries, state.plants[0].cache.surprisal[held].reshape(-1)[:length], state.logits[slot]


def test_a_prompt_is_cut_into_parts_and_parts_fill_calls():
    config = configuration(chunk=4, prefill_batch=8)
    assert chunks.split(config, [5, 6, 7, 8, 9]) == [[5, 6, 7, 8], [9]]
    first, second = chunks.calls(config, 2, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    assert [x.tolist() for x in first] == [[2, 2], [[5, 6, 7, 8], [9, 10, 11, 12]], [4, 4], [False, False]]
    assert [x.tolist() for x in second] == [[2, 0], [[13, 0, 0, 0], [0, 0, 0, 0]], [1, 0], [True, False]]
    assert list(chunks.calls(config, 0, [])) == []


@pytest.mark.parametrize(
    "calls",
    [
        [[(0, PROMPTS[0]), (1, LONG), (2, PROMPTS[2])]],
        [[(2, PROMPTS[2]), (0, PROMPTS[0])], [(1, LONG)]],
        [[(1, LONG[:8]), (0, PROMPTS[0])], [(2, PROMPTS[2]), (1, LONG[8:])]],
        [[(1, LONG[:3])], [(1, LONG[3:9]), (0, PROMPTS[0])], [(1, LONG[9:]), (2, PROMPTS[2])]],
    ],
    ids=["all at once", "two, then one", "one in two calls", "borders within pages"],
)
def test_company_in_a_call_changes_no_bit_of_what_is_cached(calls):
    """Rows of one slot may share a page with each other, and with what an earlier call wrote; a call may be empty."""
    alone = filled([[(0, PROMPTS[0])], [(1, LONG)], [(2, PROMPTS[2])]])
    together = filled([*calls, []])
    for slot in range(3):
        assert same_bits(cached(together, slot), cached(alone, slot))


def test_a_slot_without_pages_is_refused_as_a_whole_and_the_others_are_served():
    state = filled([[(0, prompt(4, 63))]])
    free = int(state.table.num_free)
    small, large = prompt(5, (free - 1) * PAGE), prompt(6, 2 * PAGE)
    state, granted = prefilled(state, [(1, small), (2, large)])
    assert granted.tolist() == [True] * (free - 1) + [False] * 2
    assert state.length.tolist() == [63, len(small), 0] and int(state.table.num_free) == 1
    assert state.table.num_blocks.tolist()[2] == 0

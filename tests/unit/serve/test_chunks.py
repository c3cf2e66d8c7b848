"""Prompts cut into chunks: what a call takes, and whom it serves where pages are short."""

import pytest
from small_model import PAGE, configuration, prompt, weights

from et_jax.decode.decoder import decoder
from et_jax.serve import chunks

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_a_prompt_is_cut_into_parts_and_parts_fill_calls():
    config = configuration(chunk=4, prefill_batch=8)
    assert chunks.split(config, [5, 6, 7, 8, 9]) == [[5, 6, 7, 8], [9]]
    first, second = chunks.calls(config, 2, [5, 6, 7, 8, 9, 10, 11, 12, 13])
    assert [x.tolist() for x in first] == [[2, 2], [[5, 6, 7, 8], [9, 10, 11, 12]], [4, 4], [False, False]]
    assert [x.tolist() for x in second] == [[2, 0], [[13, 0, 0, 0], [0, 0, 0, 0]], [1, 0], [True, False]]
    assert list(chunks.calls(config, 0, [])) == []


def test_a_slot_without_pages_is_refused_as_a_whole_and_the_others_are_served():
    d = decoder(configuration(chunk=PAGE, prefill_batch=16 * PAGE))

    def prefilled(state, *rows: tuple[int, list[int]]):
        """The state after one call with the prompts of slots, and which of their chunks were granted pages."""
        each = [(slot, chunk) for slot, tokens in rows for chunk in chunks.split(d.config, tokens)]
        state, granted = d.prefill((weights(),), state, *chunks.pack(d.config, each))
        return state, granted[: len(each)]

    state, _ = prefilled(d.empty(), (0, prompt(4, 63)))
    free = int(state.table.num_free)
    small, large = prompt(5, (free - 1) * PAGE), prompt(6, 2 * PAGE)
    state, granted = prefilled(state, (1, small), (2, large))
    assert granted.tolist() == [True] * (free - 1) + [False] * 2
    assert state.length.tolist() == [63, len(small), 0] and int(state.table.num_free) == 1
    assert state.table.num_blocks.tolist()[2] == 0

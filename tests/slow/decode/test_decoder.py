"""The functions of a decoder: when decoding stops, and that refusals change nothing."""

import jax
import numpy as np
import pytest
from decoders import made
from small_model import CHUNK, PROMPTS, fill, prompt, request, run, same_bits, start, texts, weights

from et_jax.serve.chunks import pack

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_decoding_stops_when_no_sequence_is_active_or_one_ends_where_that_is_asked():
    d, params = made("plain"), weights()
    for until_end, expected in ((True, 2), (False, 9)):
        state = d.insert(d.empty(), 0, request(5, limit=2))
        state = d.insert(state, 1, request(6, limit=9))
        state, output, ran = d.decode((params,), state, 32, np.bool_(until_end))
        assert int(ran) == expected and output.finished[:2, 0, 0].tolist() == [False, True]
    _, _, ran = d.decode((params,), state, 32)
    assert int(ran) == 0
    assert not start(d, params, d.empty(), 1, PROMPTS[0], limit=0).active.any()


def test_what_is_refused_or_of_no_tokens_changes_nothing_and_a_fork_of_full_pages_needs_none():
    """It has a future of its own."""
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 0, prompt(4, 60))
    state = start(d, params, state, 1, prompt(5, 36))  # 35 tokens: the last of nine pages is partial
    assert int(state.table.num_free) == 0
    before = jax.tree.map(np.asarray, state)
    state, granted = d.fork(state, 1, 2)
    assert not granted and same_bits(state, before)
    for slot, tokens in ((2, range(CHUNK)), (1, [])):
        state, granted = d.prefill((params,), state, *pack(d.config, [(slot, tokens)]))
        assert granted.all() == (slot == 1) and same_bits(state, before)
    state, granted = d.write_row(state, 2, jax.device_get(d.read_row(state, 1)))
    assert not granted and same_bits(state, before)
    assert not any(np.asarray(layer.pages[:, 0]).any() for layer in state.plants[0].cache.layers)  # the null page
    state = d.release(state, 1)
    state = start(d, params, state, 1, prompt(5, 33))  # 32 tokens: eight full pages
    state, granted = d.fork(state, 1, 2)
    assert granted and state.table.pages[2].tolist() == state.table.pages[1].tolist()
    _, rows = run(d, params, d.release(state, 0))
    assert len(rows[1].token) == len(rows[2].token) == 12 and texts(rows)[1] != texts(rows)[2]

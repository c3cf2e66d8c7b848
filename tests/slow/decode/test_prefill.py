"""Prompt tokens into the cache: a chunk that does not fit, or holds nothing, changes nothing."""

import jax
import numpy as np
from decoders import made
from small_model import CHUNK, fill, prompt, same_bits, weights

from et_jax.serve.chunks import pack


def test_a_refused_chunk_changes_nothing():
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 0, prompt(4, 60))
    state = fill(d, params, state, 1, prompt(5, 33))
    before = jax.tree.map(np.asarray, state)
    state, granted = d.prefill((params,), state, *pack(d.config, [(2, range(CHUNK))]))
    assert not granted.any() and same_bits(state, before)


def test_rows_of_no_tokens_do_nothing():
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 1, prompt(5, 7))
    before = jax.tree.map(np.asarray, state)
    state, granted = d.prefill((params,), state, *pack(d.config, [(1, [])]))
    assert granted.all() and same_bits(state, before)

"""What a decoder holds: what cannot work is refused, what was asked is kept, and who is served by a step."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import CHUNK, MODEL, OTHER, configuration, even_blocks, weights

from et_jax.control.budget import EntropyBudget
from et_jax.control.controller import Controller
from et_jax.decode.decoder import decoder
from et_jax.decode.drafting.drafts import Drafting
from et_jax.decode.request import request
from et_jax.decode.state import empty
from et_jax.decode.step import choose

BY_MODEL = Drafting(most=4, drafter=None)
FEWER_TOKENS = dataclasses.replace(OTHER, vocab_size=7)
OF_A_BLOCK = EntropyBudget(tokens=8, segment=CHUNK, floor=0.25)  # whose floor is less


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 1}, "batch: got 1, wanted 2 to num_slots = 3"),
        ({"prefill_batch": 6}, "prefill_batch: got 6, wanted a multiple of chunk = 8"),
        ({"chunk": 6}, "chunk: got 6, wanted a multiple of page_size = 4"),
        ({"controller": Controller(selector=(even_blocks,))}, "got 1 selectors, wanted one per layer: 2"),
        ({"controller": Controller(budget=EntropyBudget(tokens=16, segment=16))}, "wanted 16"),
        ({"controller": Controller(budget=OF_A_BLOCK)}, "at least a block of 4"),
        ({"draft": BY_MODEL}, r"others: got models of \(\) tokens, wanted \(96,\)"),
        ({"others": (OTHER,)}, r"others: got models of \(96,\) tokens, wanted \(\)"),
        ({"draft": BY_MODEL, "others": (FEWER_TOKENS,)}, r"others: got models of \(7,\) tokens, wanted \(96,\)"),
    ],
)
def test_what_cannot_work_is_refused_while_configuring(changes, message):
    with pytest.raises(ValueError, match=message):
        configuration(**changes)


def test_weights_of_fewer_models_than_a_decoder_has_are_refused():
    d = decoder(configuration(draft=BY_MODEL, others=(OTHER,)))
    with pytest.raises(TypeError, match="weights: got those of 1, wanted a tuple with those of each of the decoder's"):
        d.step((weights(),), d.empty())


def test_a_request_keeps_the_stop_ids_that_can_be_drawn_and_marks_its_prompt():
    config, size = configuration(penalties=True), MODEL.vocab_size
    asked = request(config, [3, 5, 3], limit=4, stop_ids=(7, size, -2, 0), top_k=10 * size, seed=2**32 + 9)
    assert asked.stop_ids.tolist() == [7, 0] + [-1] * (config.num_stop_ids - 2)
    assert asked.in_prompt is not None and np.flatnonzero(asked.in_prompt).tolist() == [3, 5]
    assert (int(asked.token), int(asked.sampling.top_k)) == (3, size)
    assert asked.sampling.key.tolist() == [1, 9]
    with pytest.raises(ValueError, match="stop_ids: got 9, wanted at most num_stop_ids = 8"):
        request(config, [3], limit=4, stop_ids=range(9))


PRIORITIES = np.asarray([3.0, 1.0, np.nan, 2.0, -np.inf], np.float32)


def by_arrival(signals, state):
    """The priority that a sequence was given as its number of arrival."""
    return jnp.asarray(PRIORITIES)[signals.arrival]


@pytest.mark.parametrize(
    ("active", "served"),
    [
        ([0, 1, 2, 3, 4], [2, 0, 3]),  # what is no number first
        ([0, 1, 3], [0, 3, 1]),
        ([4], [4]),  # the lowest of all before slots that are empty
        ([1, 4], [1, 4]),
        ([], []),
    ],
)
def test_the_highest_priorities_are_served_and_the_lowest_before_nobody(active, served):
    config = configuration(num_slots=5, batch=3, controller=Controller(priority=by_arrival))
    state = empty(config)
    runs = jnp.zeros(5, bool).at[jnp.asarray(active, jnp.int32)].set(True)
    state = dataclasses.replace(state, active=runs, arrival=jnp.arange(5, dtype=jnp.int32))
    _, rows = choose(config, state)
    assert np.asarray(rows.slot)[np.asarray(rows.run)].tolist() == served

"""What a run is asked of held-out text."""

import dataclasses

import numpy as np

from et_jax.tasks.generators import TASKS
from et_jax.training import loop, probe


def test_a_probe_asks_what_was_held_out_and_marks_the_answer(mixed_settings, mixed_data):
    tokenizer, _, held_out = mixed_data
    given = probe.probe(tokenizer, held_out, 128, 3, 2)
    assert given.inputs.shape == (3 * len(TASKS), 128)
    for inputs, targets, mask in zip(given.inputs, given.targets, given.answer_mask, strict=True):
        end = np.flatnonzero(mask)[-1]
        assert (inputs[1 : end + 1] == targets[:end]).all()
        assert tokenizer.decode(targets[mask].tolist()).startswith(" ")
    params = loop.initial_state(mixed_settings).params
    assert set(probe.accuracy(params, mixed_settings, given)) == set(TASKS)
    certain = dataclasses.replace(given, answer_mask=np.zeros_like(given.answer_mask))
    assert set(probe.accuracy(params, mixed_settings, certain).values()) == {1.0}

"""Rows of novels and documents, whose answers weigh most and are none of the test split, and what a run is asked."""

import dataclasses

import numpy as np
import pytest
from small_runs import MIXED_WINDOW

from et_jax.tasks.generators import TASKS, document
from et_jax.training import corpus, loop, mixture, probe
from et_jax.training.mixture import Mixture


def test_rows_are_novels_and_documents_whose_answers_weigh_most(mixed_data):
    tokenizer, train, _ = mixed_data
    sizes = {"num_windows": 4, "length": 128, "window": MIXED_WINDOW}
    found, later = (mixture.mixed_rows(Mixture(), train, tokenizer, seed=0, step=step, **sizes) for step in (0, 700))
    assert found.weights is not None and found.segments is not None and later.weights is not None
    assert found.inputs.shape == (8, 128)
    assert (found.weights[:2] == 1).all()  # a quarter of the first steps is novels
    assert np.unique(found.weights[2:]) == pytest.approx([0.0, 0.1, 1.0, 5.0])
    for inputs, targets, weights, segments in zip(
        found.inputs[2:], found.targets[2:], found.weights[2:], found.segments[2:], strict=True
    ):
        for segment in range(segments.max() + 1):
            own = segments == segment
            assert inputs[own][0] == corpus.END_ID
            assert (inputs[own][1:] == targets[own][:-1]).all()
            text = tokenizer.decode(targets[own].tolist())
            answers = tokenizer.decode(targets[own & (weights == 5)].tolist()).split()
            assert answers
            assert all(text.count(word.strip(".")) > 1 for word in answers)  # said before it is asked
        assert (weights[segments == -1] == 0).all()
    assert (later.weights[:4] == 1).all()  # half, later


def test_a_share_of_tasks_that_is_no_whole_number_of_windows_comes_out_over_the_steps():
    a_quarter = Mixture(task_shares=((0, 0.25),))
    assert [a_quarter.num_novels(step, 2) for step in range(4)] == [2, 1, 2, 1]


def drawn(mixed_data, step, length):
    """The documents of a row, drawn as those of a step are."""
    tokenizer, train, _ = mixed_data
    random = np.random.default_rng((0, step, 1))
    hay = mixture.haystack(train, tokenizer, random, MIXED_WINDOW)
    return mixture.documents(Mixture(), tokenizer, random, length, hay, mixture.vocabulary(hay, tokenizer))


@pytest.mark.parametrize("length", [128, 1024])
def test_documents_of_every_task_fit_into_a_row(mixed_data, length):
    made = [drawn(mixed_data, step, length) for step in range(40)]
    sizes = [sum(len(mixture.encode(one, mixed_data[0], Mixture())[0]) for one in found) for found in made]
    assert max(sizes) <= length
    assert {one.task for found in made for one in found} == set(TASKS)


def test_no_test_item_is_in_the_training_stream(mixed_data):
    settings = {"count": len, "length": 2000, "depth": 0.5, "split": "test", "num_pairs": 7}
    tests = [document(task, seed=seed, **settings) for task in TASKS for seed in range(40)]
    trained, tested = (
        {item for one in documents for item in (*one.items, *(turn.answer for turn in one.turns))}
        for documents in ([one for step in range(60) for one in drawn(mixed_data, step, 512)], tests)
    )
    assert len(trained) > 400 and len(tested) > 400
    assert not trained & tested


def test_a_probe_asks_what_was_held_out_and_marks_the_answer(mixed_settings, mixed_data):
    tokenizer, _, held_out = mixed_data
    given = probe.probe(tokenizer, held_out, 128, 3, 2)
    assert given.inputs.shape == (3 * len(TASKS), 128)
    for inputs, targets, mask in zip(given.inputs, given.targets, given.answer_mask, strict=True):
        end = np.flatnonzero(mask)[-1]
        assert (inputs[1 : end + 1] == targets[:end]).all()
        assert tokenizer.decode(targets[mask].tolist()).startswith(" ")
    params = loop.initial_state(mixed_settings).params
    certain = dataclasses.replace(given, answer_mask=np.zeros_like(given.answer_mask))
    assert probe.accuracy(params, mixed_settings, certain) == dict.fromkeys(TASKS, 1.0)

"""Answers of a model that is read on: right as far as greedy decoding would write them; rooms that are met."""

from types import SimpleNamespace

import numpy as np
import pytest
from scripts_here import script

from et_jax.control.compression import named
from et_jax.serve.engine import load
from et_jax.tasks.base import right

measuring = script("measure_compression")


@pytest.fixture(scope="module")
def tokenizer():
    return load("bundled", max_num_seqs=2, max_model_len=64).tokenizer


@pytest.mark.parametrize("task", ["single_key", "passkey", "copying"])
def test_an_answer_is_right_where_greedy_decoding_writes_it(tokenizer, task):
    model = SimpleNamespace(tokenizer=tokenizer, max_model_len=256)
    for asked in measuring.questions(model, task, 1):
        assert tokenizer.encode(asked.example.prompt + asked.example.answer) == asked.prompt + asked.answer
        question = asked.example.prompt[len(tokenizer.decode(asked.prompt[: asked.before])) :]
        assert question.strip() and len(tokenizer.encode(question)) == 1 + len(asked.prompt) - asked.before
        stop = tokenizer.encode(".")[-1]
        said = np.asarray([*asked.answer, stop])
        assert measuring.answered(model, asked, said)
        for place in range(len(asked.answer)):
            wrong = said.copy()
            wrong[place] = stop
            assert not measuring.answered(model, asked, wrong)
        longer = tokenizer.decode([*asked.answer, asked.answer[-1]])
        if not right(asked.example, longer):
            assert not measuring.answered(model, asked, np.asarray([*asked.answer, asked.answer[-1]]))


def test_what_follows_a_wrong_token_is_not_what_would_be_said(tokenizer):
    """The answer in other tokens: from the first of them on nobody knows what greedy decoding would say."""
    ids = {tokenizer.decode([token]): token for token in range(4096)}
    [asked] = measuring.questions(SimpleNamespace(tokenizer=tokenizer, max_model_len=256), "single_key", 1)[:1]
    first = tokenizer.decode(asked.answer[:1])
    parts = next([ids[first[:i]], ids[first[i:]]] for i in range(1, len(first)) if {first[:i], first[i:]} <= ids.keys())
    said = [*parts, *asked.answer[1:]]
    assert right(asked.example, tokenizer.decode(said)) and said != asked.answer
    assert not measuring.answered(SimpleNamespace(tokenizer=tokenizer), asked, np.asarray(said))


def test_what_is_said_after_the_point_stands_at_its_place():
    dense, later = np.arange(12).reshape(2, 6), 100 + np.arange(6).reshape(2, 3)
    found = measuring._continued(dense, later, np.asarray([4, 5]))
    assert found.tolist() == [[0, 1, 2, 3, 100, 101], [6, 7, 8, 9, 10, 103]]


@pytest.mark.parametrize("name", ["adakv", "pyramidkv"])
@pytest.mark.parametrize("wanted", [96, 384])
def test_room_is_met_by_the_most_entries_that_fit(name, wanted):
    def make(budget):
        return named(name, budget)

    how = measuring.fitting(make, wanted, 6)
    assert measuring.room(how, 6) <= wanted < measuring.room(make(how.budget + measuring.PAGE_SIZE), 6)

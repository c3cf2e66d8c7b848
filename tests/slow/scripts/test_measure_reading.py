"""Blocks closed by hand: the spans are the needles', the mask closes them alone, and the bundled model needs them."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scripts_here import script

from et_jax.control import select
from et_jax.control.controller import Controller
from et_jax.serve.engine import load
from et_jax.tasks.asking import counter, evaluate, grid

pytestmark = pytest.mark.usefixtures("hardly_optimised")

reading = script("measure_reading")


@pytest.fixture(scope="module")
def model():
    return load("bundled")


@pytest.fixture(scope="module")
def asked(model):
    """Answers in the middle of texts whose last 64 tokens and first block do not hold them."""
    return grid(counter(model), ["single_key"], [512], depths=3, samples=8, pairs=0)[8:16]


def test_a_closed_stretch_closes_every_block_that_touches_it():
    view = SimpleNamespace(start=np.arange(0, 80, 16), num_tokens=np.array([16, 16, 16, 16, 3]))
    assert reading.Closed(20, 33)(view).tolist() == [True, False, False, True, True]
    assert reading.Closed(16, 32)(view).tolist() == [True, False, True, True, True]
    assert reading.Closed(66, 67)(view).tolist() == [True, True, True, True, False]


def test_the_span_is_that_of_the_needle(model, asked):
    for _, one in asked:
        begin, end = reading.span(model, one)
        tokens = model.tokenizer.encode(one.prompt)
        question = one.prompt[one.prompt.rindex(".") + 1 :]
        assert model.tokenizer.decode(tokens[begin:end]) == f"{question}{one.answer}."
        cried = replace(one, prompt=one.prompt.replace(f".{question}", f"!{question}"))
        begin, end = reading.span(model, cried)
        assert model.tokenizer.decode(model.tokenizer.encode(cried.prompt)[begin:end]) == f"{question}{one.answer}."


def test_an_answer_is_lost_with_its_blocks_and_comes_back_with_them(model, asked):
    spans = [reading.span(model, one) for _, one in asked]
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)

    def accuracy(selector):
        return np.mean([answer.right for answer in evaluate(model, asked, control=Controller(selector=selector))])

    assert accuracy(select.Dense()) >= 0.9
    assert accuracy(reading.Closed(begin, end)) <= 0.15
    assert accuracy(select.SinksWindow(4, 64)) <= 0.15
    assert accuracy(reading.Closed(512 - 64 - (end - begin), 512 - 64)) >= 0.9  # as many blocks, of others

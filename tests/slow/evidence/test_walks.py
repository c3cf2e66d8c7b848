"""Walks of draft laws along texts, against worked examples, and what knows of a text beside what does not."""

import dataclasses

import numpy as np
import pytest

from et_jax.control.draft import AcceptanceLength, EntropyLength, FixedLength
from et_jax.evidence import walks
from et_jax.serve.engine import load

HITS = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 1], bool)


@pytest.mark.parametrize(
    ("length", "spent"),
    [
        (0, (10, 0, 0)),
        (1, (6, 6, 4)),  # 1x | x | 1x | x | 1x | 1x, where x is the model's own token
        (2, (5, 8, 5)),  # 11x | 1x | x | 11x | x, the last with no room for a draft
        (4, (4, 15, 6)),  # 11x | 1x | x | 111x, the last with room for three
    ],
)
def test_a_walk_of_a_fixed_length(length, spent):
    assert walks.walk(HITS, lambda *_: length) == spent


def test_a_walk_tells_how_the_last_draft_fared():
    told = []

    def choose(*last):
        told.append(last)
        return 3

    walks.walk(HITS, choose)
    assert told == [(0, 0, 0), (3, 3, 2), (5, 3, 1), (6, 3, 0)]


def test_laws_of_the_engine_hear_of_drafts_and_entropies():
    told = np.array([0.1, 0.1, 0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1])
    assert walks.walk(HITS, walks.by_law(FixedLength(), 2, told)) == walks.walk(HITS, lambda *_: 2)
    # 11x, its x at 0.9: none is drafted | x | x | x, at 0.9 again | x | 11x
    assert walks.walk(HITS, walks.by_law(EntropyLength(0.6), 2, told)) == (6, 8, 4)
    # the share that held is 0.5, 0.45, 0.405, 0.364, 0.328, 0.295; at cost 0.3 a draft is worth its time above 0.3
    choose = walks.by_law(AcceptanceLength(0.3), 16, told)
    assert [choose(at, 9, 0) for at in range(6)] == [1, 1, 1, 1, 1, 0]
    # all held, 0.9^9 of 0.5 is left: 0.806, and the best of (1 + p + ... + p^k) / (1 + 0.3 k) is k = 3
    choose = walks.by_law(AcceptanceLength(0.3), 16, told)
    assert [choose(0, 0, 0), choose(10, 9, 9)] == [1, 3]


def test_a_draft_stops_with_the_first_token_that_passes():
    signal = walks.ahead(np.array([[0.1, 0.9, 0.2, 0.3, 0.8]]))[0]
    assert signal.shape == (5, walks.MOST_DRAFTED)
    assert signal[1, :4].tolist() == [0.9, 0.2, 0.3, 0.8]
    choose = walks.by_stop(signal, 0.5)
    assert [choose(at, 0, 0) for at in range(4)] == [2, 1, 3, 2]
    assert walks.by_stop(signal, 1.0)(0, 0, 0) == walks.MOST_DRAFTED
    summed = walks.SIGNALS["summed entropy"](np.array([[0.1, 0.9, 0.2, 0.3, 0.8]]))[0]
    assert [walks.by_stop(summed, 0.95)(at, 0, 0) for at in range(3)] == [2, 2, 3]


@pytest.fixture(scope="module")
def texts():
    """Twelve texts whose drafter is unsure where it is wrong, and somewhat wherever else."""
    rng = np.random.default_rng(0)
    hits = rng.random((12, 200)) < 0.7
    entropy = np.where(hits, 0.0, 1.5) + rng.gamma(2.0, 0.5, hits.shape)
    return walks.Written(hits=hits, told=entropy, entropy=entropy, reproduced=1.0, circles=0)


def test_stops_are_given_as_many_drafted_tokens(texts):
    for budget in (0.7, 1.5, 4.0):
        bound, spent = walks.as_many(texts.hits, walks.ahead(texts.entropy), budget)
        assert spent.drafted.sum() / texts.hits.size == pytest.approx(budget, rel=1e-9)
        beside = walks.stopped(texts.hits, walks.ahead(texts.entropy), bound)
        assert beside.drafted.sum() / texts.hits.size == pytest.approx(budget, rel=0.02)
        assert spent.steps + spent.accepted == pytest.approx(np.full(12, 200.0))
    with pytest.raises(ValueError, match=r"0.100 drafted tokens a token were asked for; stops draft 0.\d+ to"):
        walks.as_many(texts.hits, walks.ahead(texts.entropy), 0.1)


def test_entropy_that_knows_saves_time_and_controls_of_it_do_not(texts):
    found = walks.lengths(texts, np.random.default_rng(1))
    lines = {line["law"]: line for line in found["laws"]}
    for k in (1, 4):
        line = lines[f"fixed {k}"]
        spent = walks.walked(texts.hits, (lambda *_, k=k: k for _ in texts.hits))
        assert line["tokens_per_step"] == 2400 / spent.steps.sum()
        time = spent.steps.sum() + (0.1 + walks.ROW_COST) * spent.drafted.sum()
        assert line["speed"]["0.1"] == pytest.approx(2400 / time)
        assert line["accepted"] == spent.accepted.sum() / spent.drafted.sum()
    saved = {
        (comparison["budget"], one["stop"], one["against"]): one["times"]["0.1"]
        for comparison in found["comparisons"]
        for one in comparison["savings"]
    }
    assert len(saved) == 4 * 2 * 3
    for (budget, _, against), saving in saved.items():
        assert saving["low"] > 0 or against == budget, (budget, against)
    assert all(saved[f"fixed {k}", "entropy", f"fixed {k}"]["low"] > 0 for k in (2, 4))
    # the same entropies, each at another token of its text
    blind = dataclasses.replace(texts, entropy=np.random.default_rng(2).permuted(texts.entropy, axis=1))
    for comparison in walks.lengths(blind, np.random.default_rng(1))["comparisons"]:
        by_entropy = [one["times"]["0.1"] for one in comparison["savings"] if one["stop"] == "entropy"]
        assert all(saving["low"] < 0.01 for saving in by_entropy)


@pytest.mark.usefixtures("hardly_optimised")
def test_a_model_that_drafts_for_itself_is_never_rejected():
    """The key, the position and the logits of every token are those that it was written with."""
    model = load("bundled-small", dtype="float32", max_num_seqs=4)
    prompts = np.array([model.tokenizer.encode("The weather was fine, and the " + word)[:6] for word in PROMPTS])
    prompts = np.tile(prompts, (1, 4))
    texts = walks.written(model, model, prompts, 0.7)
    assert texts.hits.shape == texts.entropy.shape and texts.hits.shape[1] == prompts.shape[1]
    assert texts.reproduced == texts.hits.mean() and texts.reproduced > 0.98
    assert texts.entropy == pytest.approx(texts.told, abs=1e-3)


PROMPTS = ("dog", "sea", "old woman", "carriage", "letter", "king")

"""Shares of drafts accepted against enumeration and races run by hand; walks of draft laws against worked examples."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from scripts_here import script

from et_jax.control.draft import AcceptanceLength, EntropyLength, FixedLength
from et_jax.serve.engine import load

measure = script("measure_acceptance")


def two_models(rows: int, size: int, apart: float = 1.0, seed: int = 0):
    """Logits of a model and of its drafter."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (rows, size)).astype(np.float32)
    return logits, (logits + rng.normal(0, apart, (rows, size))).astype(np.float32)


def distributions(rows: int, size: int, **how):
    return [measure.probabilities(jnp.asarray(logits), 0.7) for logits in two_models(rows, size, **how)]


def test_probabilities_are_of_the_heated_logits():
    found = measure.probabilities(jnp.log(jnp.array([[1.0, 2.0, 4.0]])), 0.5)
    assert found == pytest.approx(np.array([[1, 4, 16]]) / 21, rel=1e-6)


def test_the_share_of_a_race_is_the_sum_over_tokens_of_winning_both():
    p, q = distributions(5, 7)
    direct = [
        sum(1 / sum(max(a[j] / a[i], b[j] / b[i]) for j in range(7)) for i in range(7))
        for a, b in zip(p, q, strict=True)
    ]
    assert measure.race(p, q) == pytest.approx(direct, rel=1e-12)
    assert measure.race(p, p) == pytest.approx(np.ones(5), rel=1e-12)


def test_races_of_exponential_clocks_agree_as_often():
    draws = 200_000
    clocks = np.random.default_rng(1).exponential(size=(draws, 6))
    for p, q in zip(*distributions(4, 6, apart=2.0), strict=True):
        share = ((clocks / p).argmin(1) == (clocks / q).argmin(1)).mean()
        exact = measure.race(p[None], q[None])[0]
        assert abs(share - exact) < 4 * (exact * (1 - exact) / draws) ** 0.5


def test_one_number_through_both_distribution_functions():
    """Between two neighbours of all ends of intervals each model gives one token."""
    p, q = distributions(5, 9)
    for a, b, found in zip(p, q, measure.inverse_cdf(p, q), strict=True):
        ends = np.unique(np.concatenate([[0.0], np.cumsum(a)[:-1], np.cumsum(b)[:-1], [1.0]]))
        middle = (ends[1:] + ends[:-1]) / 2
        tokens = [(middle[:, None] > np.cumsum(x)[:-1]).sum(1) for x in (a, b)]
        assert found == pytest.approx(np.diff(ends)[tokens[0] == tokens[1]].sum(), rel=1e-12)


def test_the_best_coupling_and_the_bound():
    """Of thirds against a half, a half and nothing: 2/3 of the mass is shared, TV is 1/3."""
    p, q = np.array([[1, 1, 1]]) / 3, np.array([[0.5, 0.5, 0.0]])
    assert measure.optimum(p, q) == pytest.approx(2 / 3)
    assert measure.bound(p, q) == pytest.approx(1 / 2)
    p, q = distributions(50, 30)
    assert (measure.bound(p, q) < measure.race(p, q)).all() and (measure.race(p, q) < measure.optimum(p, q)).all()


def test_what_the_engine_samples_agrees_as_often_as_the_formula_says():
    """At few positions with many keys: a key that came twice would show."""
    model, drafter = (jnp.asarray(logits).reshape(2, 8, 50) for logits in two_models(16, 50))
    for temperature in (0.4, 1.0):
        found = measure.acceptance(model, drafter, temperature, 8, 300, seed=1)
        assert abs(found["sigmas"]) < 4
        off = found["shares"]["sampled"][0] - found["shares"]["race"][0]
        exact = measure.race(*(measure.probabilities(x.reshape(16, 50), temperature) for x in (model, drafter)))
        assert found["shares"]["race"][0] == pytest.approx(exact.mean())
        assert found["sigmas"] == pytest.approx(off / ((exact * (1 - exact)).sum() / 300) ** 0.5 * 16)


def test_greedy_drafts_hold_where_the_likeliest_tokens_are_one():
    model = jnp.array([[[1.0, 2.0], [3.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]]])
    drafter = jnp.array([[[1.0, 2.0], [1.0, 3.0]], [[0.0, 2.0], [0.0, 3.0]]])
    found = measure.acceptance(model, drafter, 0.0, 2, 1, seed=0)["shares"]
    assert {share[0] for share in found.values()} == {0.75}


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
    assert measure.walk(HITS, lambda *_: length) == spent


def test_a_walk_tells_how_the_last_draft_fared():
    told = []

    def choose(*last):
        told.append(last)
        return 3

    measure.walk(HITS, choose)
    assert told == [(0, 0, 0), (3, 3, 2), (5, 3, 1), (6, 3, 0)]


def test_laws_of_the_engine_hear_of_drafts_and_entropies():
    told = np.array([0.1, 0.1, 0.9, 0.1, 0.1, 0.9, 0.1, 0.1, 0.1, 0.1])
    assert measure.walk(HITS, measure.by_law(FixedLength(), 2, told)) == measure.walk(HITS, lambda *_: 2)
    # 11x, its x at 0.9: none is drafted | x | x | x, at 0.9 again | x | 11x
    assert measure.walk(HITS, measure.by_law(EntropyLength(0.6), 2, told)) == (6, 8, 4)
    # the share that held is 0.5, 0.45, 0.405, 0.364, 0.328, 0.295; at cost 0.3 a draft is worth its time above 0.3
    choose = measure.by_law(AcceptanceLength(0.3), 16, told)
    assert [choose(at, 9, 0) for at in range(6)] == [16, 1, 1, 1, 1, 0]
    # all held, 0.9^9 of 0.5 is left: 0.806, and the best of (1 + p + ... + p^k) / (1 + 0.3 k) is k = 3
    choose = measure.by_law(AcceptanceLength(0.3), 16, told)
    assert [choose(0, 0, 0), choose(10, 9, 9)] == [16, 3]


def test_a_draft_stops_with_the_first_token_that_passes():
    signal = measure.ahead(np.array([[0.1, 0.9, 0.2, 0.3, 0.8]]))[0]
    assert signal.shape == (5, measure.MOST_DRAFTED)
    assert signal[1, :4].tolist() == [0.9, 0.2, 0.3, 0.8]
    choose = measure.by_stop(signal, 0.5)
    assert [choose(at, 0, 0) for at in range(4)] == [2, 1, 3, 2]
    assert measure.by_stop(signal, 1.0)(0, 0, 0) == measure.MOST_DRAFTED
    summed = measure.SIGNALS["summed entropy"](np.array([[0.1, 0.9, 0.2, 0.3, 0.8]]))[0]
    assert [measure.by_stop(summed, 0.95)(at, 0, 0) for at in range(3)] == [2, 2, 3]


@pytest.fixture(scope="module")
def texts():
    """Twelve texts whose drafter is unsure where it is wrong, and somewhat wherever else."""
    rng = np.random.default_rng(0)
    hits = rng.random((12, 200)) < 0.7
    entropy = np.where(hits, 0.0, 1.5) + rng.gamma(2.0, 0.5, hits.shape)
    return measure.Written(hits=hits, told=entropy, entropy=entropy, reproduced=1.0, circles=0)


def test_stops_are_given_as_many_drafted_tokens(texts):
    for budget in (0.7, 1.5, 4.0):
        bound, spent = measure.as_many(texts.hits, measure.ahead(texts.entropy), budget)
        assert spent.drafted.sum() / texts.hits.size == pytest.approx(budget, rel=1e-9)
        beside = measure.stopped(texts.hits, measure.ahead(texts.entropy), bound)
        assert beside.drafted.sum() / texts.hits.size == pytest.approx(budget, rel=0.02)
        assert spent.steps + spent.accepted == pytest.approx(np.full(12, 200.0))
    with pytest.raises(ValueError, match=r"0.100 drafted tokens a token were asked for; stops draft 0.\d+ to"):
        measure.as_many(texts.hits, measure.ahead(texts.entropy), 0.1)


def test_entropy_that_knows_saves_time_and_controls_of_it_do_not(texts):
    found = measure.lengths(texts, np.random.default_rng(1))
    lines = {line["law"]: line for line in found["laws"]}
    for k in (1, 4):
        line = lines[f"fixed {k}"]
        spent = measure.walked(texts.hits, (lambda *_, k=k: k for _ in texts.hits))
        assert line["tokens_per_step"] == 2400 / spent.steps.sum()
        time = spent.steps.sum() + (0.1 + measure.ROW_COST) * spent.drafted.sum()
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
    for comparison in measure.lengths(blind, np.random.default_rng(1))["comparisons"]:
        by_entropy = [one["times"]["0.1"] for one in comparison["savings"] if one["stop"] == "entropy"]
        assert all(saving["low"] < 0.01 for saving in by_entropy)


@pytest.mark.usefixtures("hardly_optimised")
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_model_that_drafts_for_itself_is_never_rejected(temperature):
    """The key, the position and the logits of every token are those that it was written with."""
    model = load("bundled-small", dtype="float32", max_num_seqs=4)
    prompts = np.array([model.tokenizer.encode("The weather was fine, and the " + word)[:6] for word in PROMPTS])
    prompts = np.tile(prompts, (1, 4))
    texts = measure.written(model, model, prompts, temperature)
    assert texts.hits.shape == texts.entropy.shape and texts.hits.shape[1] == prompts.shape[1]
    assert texts.reproduced == texts.hits.mean() and texts.reproduced > 0.98
    assert texts.entropy == pytest.approx(texts.told, abs=1e-3)


PROMPTS = ("dog", "sea", "old woman", "carriage", "letter", "king")


def test_a_file_is_one_text(tmp_path):
    (tmp_path / "play.txt").write_text("One.\nTwo.\n\nThree.")
    assert measure.works(tmp_path / "play.txt") == ["One.\nTwo.\n\nThree."]

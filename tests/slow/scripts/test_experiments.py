"""Most experiments once in quick size, on a random model of two layers, and a relation that its figures must keep."""

import dataclasses
import gzip
import json

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.models.calibration import write_calibration
from scripts.chip import cases, processes
from scripts.experiments.answers import SIGNALS, exceeded
from scripts.experiments.predictors import auc
from scripts.experiments.summaries import prefix
from scripts.measuring import experiment, runner
from scripts.measuring.results import REPOSITORY
from scripts.measuring.shapes import SMALL, even_heads, random_folder

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SHAPE = dataclasses.replace(SMALL, vocab_size=4096, max_positions=256)
TEXT = REPOSITORY / "et_jax/models/calibrations/text.txt"
APART = {"gguf", "drafting"}  # it needs llama.cpp; it takes minutes and has no part of its own
TRAINED = {"switching", "predictors"}  # that take the bundled models


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = random_folder(tmp_path_factory.mktemp("model"), SHAPE, jnp.float32)
    write_calibration(path, even_heads(SHAPE), {})
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl.gz"
    sizes = [(90, 9, 0), (40, 4, 0), (60, 12, 100), (80, 3, 300), (20, 6, 350), (30, 5, 900)]
    with gzip.open(path, "wt") as file:
        for prompt, answer, time in sizes:
            file.write(json.dumps({"input_length": prompt, "output_length": answer, "timestamp": time}) + "\n")
    return path


def rows(run, arm, figure, group=0):
    return np.asarray(run["groups"][group]["arms"][arm]["rows"][figure])


def value(run, arm, figure, group=0):
    return run["groups"][group]["arms"][arm]["figures"][figure]["value"]


def selection(run):
    assert np.all(rows(run, "dense", "divergence") == 0) and np.all(rows(run, "dense", "share_read") == 1)
    of_quest = [f"quest {share:g}" for share in (0.5, 0.25, 0.125, 0.0625)]
    assert all(np.all(rows(run, arm, "divergence") > 0) for arm in of_quest)
    beside = {arm: rows(run, arm, "share_bytes") - rows(run, arm, "share_read") for arm in ("dense", *of_quest)}
    assert np.all(beside["dense"] == 0) and np.all(beside["quest 0.5"] > 0)  # the summaries that it scores
    codes = rows(run, "certified 0.5", "share_bytes") - rows(run, "certified 0.5", "share_read")
    assert np.all(codes > beside["quest 0.5"])
    between = value(run, "quest", "divergence", group=1)  # at equal bytes: on its curve, or it says how far that goes
    assert value(run, "quest 0.5", "divergence") < between < value(run, "quest 0.25", "divergence")


def calibration(run):
    """Each arm reads the share asked for; of a model whose heads count alike all deals are the same."""
    assert np.all(rows(run, "dense", "divergence") == 0)
    for arm in ("calibrated", "equal", "shuffled"):
        assert 0.4 <= value(run, arm, "share_read") <= 0.6
    np.testing.assert_array_equal(rows(run, "calibrated", "loss"), rows(run, "shuffled", "loss"))


def compression(run):
    for arm in ("snapkv", "streaming"):
        assert np.all(rows(run, arm, "divergence") > 0) and np.all(rows(run, arm, "share_read") < 0.75)


def miscalibration(run):
    """An overconfident model has a greater theta, and reads fewer blocks."""
    for figure in ("theta", "divergence"):
        assert value(run, "logits x 1", figure) < value(run, "logits x 100", figure)
    assert value(run, "logits x 1", "share_read") > value(run, "logits x 100", "share_read")


def predictors(run):
    """A signal is compared with both kinds of tokens in every row."""
    for arm in ("next-token entropy", "unread mass"):
        for figure in ("wrong", "costly"):
            assert np.all((rows(run, arm, figure) >= 0) & (rows(run, arm, figure) <= 1))


def test_auc_is_the_share_of_pairs_in_order():
    signal, kind = np.array([[3.0, 1.0, 2.0, 2.0]]), np.array([[True, False, True, False]])
    assert auc(signal, kind).tolist() == [3.5 / 4]  # 3 > 1, 3 > 2, 2 > 1, and a tie
    assert np.isnan(auc(signal, np.ones_like(kind))).all()


def prefill(run):
    for arm in ("constant", "entropy", "mass"):
        assert value(run, arm, "divergence") > 0


def estimators(run):
    assert value(run, "tail corrected, share 1/2", "error") < value(run, "top k", "error")
    for arm in ("top k", "tail corrected, share 1"):
        assert np.all(rows(run, arm, "outside") == 0)


def answers(run):
    assert np.all(rows(run, "off", "share_read") == 1) and np.all(rows(run, "certified 0.5", "share_read") <= 1)
    assert set(rows(run, "off", "right")) <= {0.0, 1.0}


def test_wrong_answers_are_compared_with_right_ones_of_lesser_signal():
    signal, wrong = np.array([3.0, 1.0, 2.0, 2.0]), np.array([True, False, True, False])
    assert exceeded(signal, wrong).tolist() == [1.0, 0.75]  # 3 > 1 and 2; 2 > 1, and a tie
    assert exceeded(signal, np.ones_like(wrong)).size == exceeded(signal, np.zeros_like(wrong)).size == 0


def summaries(run):
    """Dense summaries are their own reference; weights in 8 bits read everything."""
    assert np.all(rows(run, "off", "rouge") == 1) and np.all(rows(run, "off", "same") == 1)
    assert np.all(rows(run, "quest", "share_read") < 1)
    assert np.all(rows(run, "the next passage's", "same") < 1)


def test_the_same_tokens_are_counted_up_to_the_first_that_differs():
    assert prefix((1, 2, 9, 4), (1, 2, 3, 4)) == 0.5 and prefix((1, 2), (1, 2, 3, 4)) == 0.5
    assert prefix((1, 2, 3), (1, 2, 3)) == 1


def temperature(run):
    assert np.all(rows(run, "fixed", "temperature") == 1)
    assert np.all(rows(run, "solve", "off") <= rows(run, "fixed", "off"))
    assert np.all(rows(run, "cool only, solve", "temperature") <= 1)


def switching(run):
    """The model agrees with itself but for ties; a bound that no entropy reaches leaves the small one all words."""
    assert np.all(rows(run, "the model", "same") >= 0.9) and np.all(rows(run, "the small", "share") == 0)
    assert np.all(rows(run, "as printed", "share") <= 1 / 16)
    assert value(run, "as printed", "share", 1) > 0


def scheduling(run):
    """Answers have the same tokens under every order, and the oracle's mean wait is the least; scoring moves bytes."""
    assert np.all(rows(run, "fcfs", "latency") >= np.array([9, 4, 12, 3, 6, 5]) - 1)
    assert value(run, "srpt", "latency") <= value(run, "fcfs", "latency")
    assert np.all(rows(run, "fcfs", "first_token") <= rows(run, "fcfs", "latency"))
    np.testing.assert_array_equal(rows(run, "fcfs", "loss"), rows(run, "srpt", "loss"))
    assert value(run, "attention", "tokens_per_gigabyte") < value(run, "fcfs", "tokens_per_gigabyte")


def every_round(run):
    """Each arm of groups that are timed has its figures of every round, and takes time."""
    for group in run["groups"]:
        for arm in group["arms"].values():
            assert {len(one) for one in arm["rows"].values()} == {run["settings"]["rounds"]}
            assert min(next(iter(arm["rows"].values()))) > 0


peers = presets = start = every_round


def chip(run):
    """Each case has its rounds; the median is shown with the least and the greatest."""
    [group] = run["groups"]
    for arm in group["arms"].values():
        least, median, greatest = sorted(arm["rows"]["milliseconds"])
        shown = arm["figures"]["milliseconds"]
        assert 0 < least == shown["low"] and median == shown["value"] and greatest == shown["high"]
        assert 0 < arm["rows"]["share_read"] <= 1
    assert group["arms"]["certified"]["rows"]["tolerance"] > 0


def test_a_process_that_fails_says_why_last():
    case = cases.Case(engine="decode", shape="none", rows=1, tokens=64)
    found = list(processes.measured(cases.Settings(), [case, case]))
    assert found == [{"error": "KeyError: 'none'"}, {"error": "its process ended with 0"}]


def signals(run):
    """Each arm has found its budget, or it is missed."""


def kernels(run):
    """Milliseconds times GB/s are the bytes of the listed keys and values: of 256 tokens, 8 heads of 128 in float32."""
    every_round(run)
    for arm, share in (("xla, 1", 1.0), ("xla, 0.5", 0.5), ("in order", 1.0)):
        found = rows(run, arm, "milliseconds") * rows(run, arm, "gb_per_s")
        np.testing.assert_allclose(found, share * 8 * 256 * 2 * 128 * 4 / 1e6)


def structured(run):
    """Every text follows its schema, which leaves less entropy than the model has."""
    every_round(run | {"groups": run["groups"][1:]})
    assert rows(run, "under the schema", "valid").all()
    assert np.all(rows(run, "under the schema", "left") < rows(run, "under the schema", "entropy"))


LOOKED_AT = {
    "temperature": ("fixed", "solve", "cool only, solve"),
    "scheduling": ("fcfs", "srpt", "attention"),
    "signals": ("constant", "expected error"),
}
"""The arms of experiments that have many: each compiles programs of its own."""
MISSED = {
    "selection": ["certified"],  # whose curve lies beyond the bytes compared at
    "answers": [f"{control}, {signal}" for control in ("off", "certified 0.5") for signal in SIGNALS],  # none is right
}


def of_few_arms(name: str, found: experiment.Experiment) -> experiment.Experiment:
    def groups(settings):
        for group in found.groups(settings):
            arms = {arm: one for arm, one in group.arms.items() if arm in LOOKED_AT.get(name, group.arms)}
            yield dataclasses.replace(group, arms=arms)

    return dataclasses.replace(found, groups=groups)


@pytest.mark.parametrize("name", sorted({*experiment.names()} - APART))
def test_an_experiment_in_quick_size(name, folder, trace):
    found = of_few_arms(name, experiment.load_experiment(name))
    fields = {field.name for field in dataclasses.fields(found.settings)}
    given = {"text": TEXT} | ({"trace": trace} if name not in TRAINED else {})
    given |= {} if name in TRAINED else {"model": str(folder), "small": str(folder)}
    settings = experiment.settings_of(found, {key: one for key, one in given.items() if key in fields}, quick=True)
    run = runner.run(name, found, settings, None)
    missed = [arm for group in run["groups"] for arm, one in group["arms"].items() if "missed" in one]
    assert missed == MISSED.get(name, [])
    globals()[name](run)

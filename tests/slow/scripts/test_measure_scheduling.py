"""The order of service under every rule is that of a simulation; figures and ratios by hand."""

import dataclasses
import gzip
import json

import numpy as np
import pytest
from scripts_here import script

from et_jax.errors import UsageError
from et_jax.serve.engine import load
from et_jax.serve.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

measure = script("measure_scheduling")
RULES = {rule.name: rule for rule in measure.RULES}
LENGTHS, TIMES, BATCH = [9, 4, 12, 3, 6, 5], [0.0, 0.0, 0.1, 0.3, 0.35, 0.9], 2


@pytest.fixture(scope="module")
def model():
    return load("bundled", max_num_seqs=BATCH, max_resident_seqs=len(LENGTHS), max_model_len=32)


@pytest.fixture(scope="module")
def stretch(model):
    """Return a stretch of known lengths, with the entropies of its answers."""
    asked = [
        GenerationRequest(prompt=(1, 50 + i), params=SamplingParams(max_tokens=length, ignore_eos=True, seed=i))
        for i, length in enumerate(LENGTHS)
    ]
    answers = model.generate(asked)
    entropies = [np.array([row.entropy for row in answer.trace]) for answer in answers]
    return measure.Stretch(asked=asked, time=np.array(TIMES), entropies=entropies)


SCORES = {  # of a request by its number, the tokens that it has and the steps that it has waited
    "fcfs": lambda i, had, waited: -i,
    "srpt (oracle)": lambda i, had, waited: had - LENGTHS[i],
    "least attained": lambda i, had, waited: -had,
}


@pytest.mark.parametrize("name", SCORES)
def test_requests_are_served_in_the_order_of_the_rule(model, stretch, name):
    """Step by step; of equal scores that of the lower slot is served, the first free one being given to a newcomer."""
    arrived = np.array(TIMES) * sum(LENGTHS) / (BATCH * 1.5)
    found = measure.replay(model, RULES[name], stretch, 1.5, max(LENGTHS))
    slots: dict[int, int] = {}
    had, waited, first, last = ([0.0] * len(LENGTHS) for _ in range(4))
    now, coming = 0.0, list(range(len(LENGTHS)))
    while coming or slots:
        if not slots and arrived[coming[0]] > now:
            now = arrived[coming[0]]
        while coming and arrived[coming[0]] <= now:
            free = min(set(range(len(LENGTHS))) - slots.keys())
            slots[free] = coming.pop(0)
        now += 1.0
        ranked = sorted(
            slots, key=lambda slot: (-SCORES[name](slots[slot], had[slots[slot]], waited[slots[slot]]), slot)
        )
        for place, slot in enumerate(ranked):
            i = slots[slot]
            waited[i] = 0 if place < BATCH else waited[i] + 1
            if place < BATCH:
                had[i] += 1
                first[i] = first[i] or now
                if had[i] == LENGTHS[i]:
                    last[i] = now
                    del slots[slot]
    np.testing.assert_allclose(found["latency"], last - arrived)
    np.testing.assert_allclose(found["first_token"], first - arrived)
    assert found["steps"] == now and found["tokens"] == sum(LENGTHS)


@pytest.mark.parametrize("name", ["paper_linear, entropies of other texts", "paper_ratio, aged"])
def test_entropic_time_is_that_of_the_true_entropies_whatever_a_rule_is_told(model, stretch, name):
    found = measure.replay(model, RULES[name], stretch, 1.5, max(LENGTHS))
    falls = sum(np.maximum(0.0, own[:-1] - own[1:]).sum() for own in stretch.entropies)
    assert found["course"][-1][1] == pytest.approx(falls, rel=1e-4)


def test_a_request_that_does_not_end_as_it_did_is_told(model, stretch):
    other = dataclasses.replace(stretch, entropies=[each[:-1] for each in stretch.entropies])
    with pytest.raises(RuntimeError, match="of 8 tokens has 9"):
        measure.replay(model, RULES["fcfs"], other, 1.5, max(LENGTHS))


def result(latency, first_token, course, steps=8.0, **fields):
    return {
        "latency": np.array(latency),
        "first_token": np.array(first_token),
        "steps": steps,
        "tokens": 12,
        "longest_wait": 3,
        "bound": None,
        "course": course,
    } | fields


def test_figures_by_hand():
    one = result([2.0, 4.0], [1.0, 2.0], [(4.0, 3.0, 2e6), (5.0, 9.0, 9e6)], bound=5)
    two = result([6.0, 12.0], [3.0, 4.0], [(3.0, 1.0, 2e6), (4.5, 7.0, 7e6)], steps=4.0, longest_wait=4, bound=6)
    found = measure.figures([one, two], [4.0, 3.5])
    expected = {
        "mean_latency": 6.0,
        "p50_latency": 5.0,
        "p99_latency": 6.0 + 0.97 * 6.0,
        "mean_first_token": 2.5,
        "tokens_per_step": 2.0,
        "nats_at_half": 2.0,
        "nats_per_megabyte_at_half": 1.0,
        "longest_wait": 4,
        "bound": 5,
    }
    assert found == pytest.approx(expected)


def test_ratios_are_over_all_stretches_and_their_ends_those_of_single_ones():
    course = [(1.0, 1.0, 1e6)]
    results = {name: [result([2.0], [1.0], course), result([6.0], [1.0], course)] for name in RULES}
    results["paper_linear"] = [result([1.0], [2.0], course), result([9.0], [2.0], course)]
    [row] = [
        row
        for row in measure.case(results)["ratios"]
        if (row["rule"], row["over"]) == ("paper_linear", "least attained")
    ]
    assert row["mean_latency"] == [10 / 8, 0.5, 1.5] and row["mean_first_token"] == [2.0, 2.0, 2.0]


def test_a_trace_is_read_from_any_request_on_and_refused_where_it_ends(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for i in range(5):
            file.write(json.dumps({"input_length": i, "output_length": 10 * i, "timestamp": 100 * i}) + "\n")
    np.testing.assert_array_equal(measure.recorded(path, 2, 2), [[2, 3], [20, 30], [200, 300]])
    with pytest.raises(UsageError, match="has 2 requests after the first 3; 4 were asked for"):
        measure.recorded(path, 3, 4)


def test_lengths_are_in_proportion_to_the_longest():
    assert measure.scaled(np.array([1.0, 250.0, 1000.0]), 200, 1) == [1, 50, 200]

"""Completions: what entropy and cost come to over several, and of `best_of` the likeliest, the best first."""

import dataclasses

import numpy as np
import pytest
from capabilities import tiny
from plain_sequences import row
from stand_in import completion

from et_jax.serve.best_of import BestOf
from et_jax.serve.completions import Completion, TokenEvent, TokenTrace
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.totals import Totals

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_the_likeliest_of_those_sampled_are_returned_beside_other_requests():
    params = SamplingParams(max_tokens=9, n=5, temperature=2.0, seed=3)
    chosen = dataclasses.replace(params, n=2, best_of=5)
    with tiny() as model:
        every = model.generate("It was", params)
        means = [np.mean([row.logprob for row in one.trace]) for one in every]
        likeliest = [every[i] for i in np.argsort(means)[::-1][:2]]
        mixed = [GenerationRequest(prompt=one, params=chosen) for one in ("It was", "The sea")]
        mixed.insert(1, GenerationRequest(prompt="It was", params=params))
        before = model.metrics.cost, model.metrics.flops
        found = model.generate(mixed)
        after = model.metrics.cost, model.metrics.flops
        assert sum(one.cost for one in found) == pytest.approx(after[0] - before[0])
        assert sum(one.flops for one in found) == pytest.approx(after[1] - before[1])
        assert [one.text for one in found[:2]] == [one.text for one in likeliest]
        assert [one.index for one in found] == [0, 1, 0, 1, 2, 3, 4, 0, 1]
        assert [one.text for one in found[2:7]] == [one.text for one in every]
        events = list(model.stream("It was", chosen))
        assert [event.index for event in events] == sorted(event.index for event in events)
        assert "".join(event.text for event in events if event.index == 1) == likeliest[1].text
        ended = [(index, one.text) for index, one in model.as_completed(mixed[:1])]
        assert ended == [(0, one.text) for one in likeliest]
        stopped = [one for _, one in model.as_completed(mixed[:1], cancelled=lambda: model.metrics.steps > 3)]
        assert [(one.index, one.finish_reason) for one in stopped] == [(0, "abort"), (1, "abort")]


def test_a_call_cancelled_amid_its_submissions_returns_the_best_of_those_submitted():
    ended = [completion("It", "ab", 0, finish_reason="abort"), completion("It", "cde", 1, finish_reason="abort")]
    params = SamplingParams(n=1, best_of=3)
    chooser = BestOf()
    chooser._asked[0] = params
    events = (TokenEvent(prompt_index=0, index=one.index, text="", trace=None, completion=one) for one in ended)
    [found] = [event.completion for event in chooser.chosen(events) if event.completion]
    assert (found.text, found.cost, found.flops) == ("ab", 5 * 10.0, 5 * 20.0)  # of the five tokens of both


def of_rows(trace: list[TokenTrace]) -> Completion:
    told = {"prompt": "a", "prompt_tokens": 1, "index": 0, "text": "", "finish_reason": "length"}
    return Completion(token_ids=tuple(each.token for each in trace), trace=tuple(trace), **told)


def test_entropic_time_is_that_of_the_last_token_and_rates_are_the_worst():
    early = row(5, entropic_time=1.0, guard_rates={"stability": 0.5})
    late = row(6, entropic_time=3.0, guard_rates={"stability": 0.2})
    one, other = of_rows([early, late]), of_rows([early])
    assert (one.entropic_time, one.efficiency) == (3.0, 0.5) and one.guard_rates == {"stability": 0.2}
    summary = Totals.of([one, other]).to_dict()
    assert (summary["entropic_time"], summary["nats_per_byte"]) == (4.0, 4 / 9)
    assert summary["guard_rates"] == {"stability": 0.5}
    said = of_rows([row(5, surprisal=0.25)]).to_dict()
    assert said["logprobs"] == [-0.25] and said["usage"] == {"prompt_tokens": 1, "completion_tokens": 1}
    bound = [row(5, entropy=3.0, constrained_entropy=0.0), row(5, entropy=1.0, constrained_entropy=1.0), row(5)]
    assert Totals.of([of_rows(bound)]).to_dict()["mean_constrained_entropy"] == 0.5
    assert "75% of the entropy decided by the grammar" in Totals.of([of_rows(bound)]).described()
    assert "grammar" not in Totals.of([of_rows(bound[2:])]).described()
    none = of_rows([])
    assert (none.entropic_time, none.cost, none.efficiency, none.guard_rates, none.logprobs) == (0.0, 0.0, 0.0, {}, ())

"""`best_of`: of the continuations that are sampled the likeliest are returned, the best first."""

import dataclasses

import numpy as np
import pytest
from capabilities import tiny
from stand_in import completion

from et_jax.errors import UsageError
from et_jax.serve.best_of import BestOf
from et_jax.serve.completions import TokenEvent
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


def test_several_share_the_cost_of_those_that_are_not_returned():
    params, chooser = SamplingParams(n=2, best_of=4), BestOf()
    chooser._asked[0] = params
    ended = [completion("It", text, index) for index, text in enumerate(("ab", "cd", "efgh", "ijkl"))]
    events = (TokenEvent(prompt_index=0, index=one.index, text="", trace=None, completion=one) for one in ended)
    found = [event.completion for event in chooser.chosen(events) if event.completion]
    assert [one.cost for one in found] == [10.0 * (2 + 4)] * 2
    totals = Totals.of(found)
    assert (totals.cost, totals.flops) == (12 * 10.0, 12 * 20.0)


def test_fewer_than_are_returned_is_refused():
    with pytest.raises(UsageError, match=r"best_of is 2; it must be 1 \(off\), or at least n, 3\."):
        SamplingParams(n=3, best_of=2)

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
        found = model.generate(mixed)
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
    ended = [completion("It", "ab", 0, finish_reason="abort"), completion("It", "cd", 1, finish_reason="abort")]
    params = SamplingParams(n=1, best_of=3)
    chooser = BestOf()
    chooser._asked[0] = params
    events = (TokenEvent(prompt_index=0, index=one.index, text="", trace=None, completion=one) for one in ended)
    assert [event.completion.text for event in chooser.chosen(events) if event.completion] == ["ab"]


def test_fewer_than_are_returned_is_refused():
    with pytest.raises(UsageError, match=r"best_of is 2; it must be 1 \(off\), or at least n, 3\."):
        SamplingParams(n=3, best_of=2)

"""Drafts in the engine: the same texts and traces for every kind of request, pages that balance, counts that add up."""

import dataclasses

import jax
import pytest
from reopened import SIZES, assert_balanced, reopened

from et_jax.control.draft import RooflineLength, StepTimes
from et_jax.control.presets import preset
from et_jax.decode.draft import Drafting, Pruned
from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.completions import Completion
from et_jax.serve.config import EngineConfig
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.step_clock import GAIN, StepClock

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIST = "The guests were these: Mr. Brown, Mrs. Brown, Miss Ada Brown, Mr. Grey. "
DRAFTS = {"draft": "lookup", "draft_tokens": 4, "draft_length": "fixed"}


def asked() -> list[GenerationRequest]:
    """Requests of every kind: greedy and sampled, cut, penalised, with stops, alternatives, one never drafted for."""
    several = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2},
        {"temperature": 0.5, "top_p": 0.9, "seed": 5, "n": 2, "logprobs": 3},
        {"temperature": 0.0, "stop": ("Grey",)},
        {"temperature": 1.0, "top_k": 20, "min_p": 0.05, "seed": 9, "frequency_penalty": 0.3},
        {"temperature": 0.0, "max_tokens": 9},
    ]
    prompts = [LIST * 2 + "The guests were", "It was late in", LIST * 2, LIST * 2 + "The", LIST, LIST]
    requests = [
        GenerationRequest(prompt=prompt, params=SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | settings))
        for prompt, settings in zip(prompts, several, strict=True)
    ]
    return [*requests[:-1], dataclasses.replace(requests[-1], draft_tokens=0)]


def all_but_costs(completion: Completion):
    """All that drafts may not change: everything but what a token is charged, and what is told of the drafts."""
    rows = [dataclasses.replace(row, cost=0.0, flops=0.0, drafted=0, accepted=False) for row in completion.trace]
    return completion.text, completion.finish_reason, rows


def opened(**settings) -> engine.Model:
    return engine.load(**(SIZES | {"max_model_len": 192} | settings))


@pytest.fixture(scope="module")
def plain():
    """What is written without drafts."""
    return opened().generate(asked())


@pytest.mark.parametrize(
    "settings",
    [
        {"draft": "bundled-small", "draft_length": "entropy", "replicas": 2},
        {"draft_length": "acceptance", "max_resident_seqs": 5, "num_pages": 40},
    ],
)
def test_texts_and_traces_are_those_without_drafts(plain, settings):
    model = opened(**(DRAFTS | settings))
    done = model.generate(asked())
    for one, other in zip(done, plain, strict=True):
        assert all_but_costs(one) == all_but_costs(other)
    rows = [row for completion in done for row in completion.trace]
    metrics = model.metrics
    assert metrics.drafted_tokens >= metrics.accepted_tokens > 0
    assert metrics.accepted_tokens == sum(row.accepted for row in rows)
    assert not any(row.drafted or row.accepted for row in done[-1].trace)
    assert_balanced(model)
    again = model.generate(asked()[:1])  # its beginning is kept now
    assert all_but_costs(again[0]) == all_but_costs(done[0])


def test_a_control_that_leaves_nothing_to_draft_is_refused_wherever_it_is_given():
    """Where two models take turns a drafter would speak; where one token sets what the next reads nothing drafts."""
    sentences = {
        "guarded": "^draft guesses tokens ahead",
        "paper": "^draft guesses tokens ahead",
        "ead": "^draft is for",
    }
    for draft in ("lookup", "bundled-small"):
        model = opened(**DRAFTS | {"draft": draft})
        assert any(f"up to 4 tokens drafted by {draft}, fixed length" in line for line in model.describe())
        for control, sentence in sentences.items():
            with pytest.raises(UsageError, match=sentence):
                model.generate(LIST, control=control)
            with pytest.raises(UsageError, match=sentence):
                model.as_completed([], control=preset(control))
            with pytest.raises(UsageError, match=sentence):
                engine.load(**SIZES, **DRAFTS | {"draft": draft}, control=control)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"draft": "lookup", "draft_length": "long"},
            'draft_length is "long"; choose one of acceptance, entropy, fixed.',
        ),
        ({"draft": "lookup", "draft_tokens": 0}, "draft_tokens is 0"),
        ({"draft_tokens": 17}, "draft_tokens is 17"),
        ({"draft": "lookup+lookup"}, "draft is lookup+lookup; after the plus name self or a smaller model"),
        ({"draft": "self+lookup"}, "draft is self+lookup; the lookup is asked first, so write lookup+self."),
        ({"draft": "lookup+"}, "draft is lookup+; after the plus name self or a smaller model"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(UsageError) as refusal:
        EngineConfig(**settings)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_request_that_asks_for_no_number_of_drafts_is_refused():
    for number in (-1, 17):
        with pytest.raises(UsageError, match="draft_tokens"):
            GenerationRequest(prompt="It was", params=SamplingParams(), draft_tokens=number)


@pytest.fixture(scope="module")
def for_itself():
    """A model that drafts for itself."""
    return opened(name="bundled-small", draft="self", draft_tokens=4)


def test_laws_told_by_the_clock_steer_how_much_is_drafted_and_no_text(for_itself, monkeypatch):
    """Told that drafts are free they are made in a short text, told that they are dear they are not."""
    requests, model = asked()[:2], for_itself
    found = {}
    for name, cost in (("free", 0.0), ("dear", 1.0)):
        times = StepTimes(plain=1.0, plain_cached=0.0, drafted=cost, drafted_cached=0.0, row=cost, row_cached=0.0)
        laws = Drafting(length=RooflineLength(times, 1.0, widths=(4.0,)), drafter=Pruned(), most=4).laws
        monkeypatch.setattr(StepClock, "note", lambda *_, laws=laws: laws)
        model.generate("It was late in", max_tokens=150, ignore_eos=True)  # in which the laws are told
        before = model.metrics.drafted_tokens
        done = model.generate(requests)
        found[name] = [all_but_costs(one) for one in done], model.metrics.drafted_tokens - before
    assert found["free"][0] == found["dear"][0]
    assert found["free"][1] > 20 and found["dear"][1] == 0
    assert model.metrics.programs_compiled_late == 0


def test_the_clock_is_read_where_a_law_asks_for_times(for_itself):
    """After some bursts the laws are others than those at the beginning."""
    model = reopened(for_itself)
    [replica] = model.replicas().replicas
    [before] = jax.device_get(replica.device.state.draft_laws)
    model.generate(["It was late in", LIST], max_tokens=150, ignore_eos=True)
    [own] = jax.device_get(replica.device.state.draft_laws)
    assert own.times != before.times and own.worth >= GAIN and own.times.plain > 0
    fixed = opened(name="bundled-small", **DRAFTS).decoder_config.draft
    assert fixed is not None and fixed.times is None

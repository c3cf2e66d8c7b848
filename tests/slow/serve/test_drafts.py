"""Drafts in the engine: the same completions for every kind of request, pages that balance, counts that add up."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from reopened import SIZES, assert_balanced, bits, reopened

from et_jax.control.draft import StepTimes
from et_jax.control.draft_speed import RooflineLength
from et_jax.control.presets import preset
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.serve import engine
from et_jax.serve.clocks.step_clock import GAIN, StepClock
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.sizing import decoder_config
from et_jax.serve.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIST = "The guests were these: Mr. Brown, Mrs. Brown, Miss Ada Brown, Mr. Grey. "


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


def without_drafts(done) -> list:
    """Every bit of completions but the charges and the counts of drafts."""
    return [bits(one, flops=0.0, drafted=0, accepted=False) for one in done]


def opened(**settings) -> engine.Model:
    return engine.load(**SIZES | {"max_model_len": 192} | settings)


def test_completions_and_what_every_head_read_are_those_without_drafts():
    """The lookup drafts first, a model where it finds nothing; the control leaves blocks unread."""
    control = preset("certified", min_blocks=1, window=4, tolerance=0.5)
    settings = {"control": control, "page_size": 4, "num_pages": 161, "trace_reads": True}
    settings |= {"replicas": 2, "name": "bundled"}
    expected = opened(**settings).generate(asked())
    model = opened(draft="lookup+bundled-small", draft_tokens=4, draft_length="entropy", **settings)
    assert any("up to 4 tokens drafted by lookup+bundled-small" in line for line in model.describe())
    done = model.generate(asked())
    assert without_drafts(done) == without_drafts(expected)
    rows, metrics = [row for one in done for row in one.trace], model.metrics
    assert metrics.drafted_tokens >= metrics.accepted_tokens == sum(row.accepted for row in rows) > 0
    assert not any(row.drafted or row.accepted for row in done[-1].trace)
    heads = [model.config.num_kv_heads] * model.config.num_layers
    for row in rows:
        assert row.reads is not None
        assert [len(layer) for layer in row.reads] == heads and sum(map(sum, row.reads)) == row.blocks_read
        held = row.blocks_held // sum(heads)
        assert all(type(head) is int and 1 <= head <= held for layer in row.reads for head in layer)
    assert any(len({head for layer in row.reads or () for head in layer}) > 1 for row in rows)
    assert without_drafts(model.generate(asked()[:1])) == without_drafts(expected[:1])  # from cached prefix pages
    assert_balanced(model)


@pytest.fixture(scope="module")
def for_itself():
    """A model that drafts for itself."""
    return opened(draft="self", draft_tokens=4)


def test_laws_set_by_the_clock_steer_how_much_is_drafted_and_no_completion(for_itself, monkeypatch):
    """If a drafted token takes no time many are drafted in a short completion, if it takes a step's time none is."""
    requests, model = asked()[:2], for_itself
    found = {}
    for name, cost in (("free", 0.0), ("dear", 1.0)):
        times = StepTimes(plain=1.0, plain_cached=0.0, drafted=cost, drafted_cached=0.0, row=cost, row_cached=0.0)
        laws = Drafting(length=RooflineLength(times, 1.0, widths=(4.0,)), drafter=Pruned(), most=4).laws
        monkeypatch.setattr(StepClock, "record", lambda *_, laws=laws: laws)
        model.generate("It was late in", max_tokens=150, ignore_eos=True)  # in which the laws are set
        before = model.metrics.drafted_tokens
        found[name] = without_drafts(model.generate(requests)), model.metrics.drafted_tokens - before
    assert found["free"][0] == found["dear"][0]
    assert found["free"][1] > 20 and found["dear"][1] == 0
    assert model.metrics.programs_compiled_late == 0


def test_the_clock_sets_laws_that_ask_for_times(for_itself):
    """After some bursts the laws are others than those at the beginning."""
    model = reopened(for_itself)
    [replica] = model.replicas().replicas
    [before] = jax.device_get(replica.device.state.draft_laws)
    model.generate(["It was late in", LIST], max_tokens=150, ignore_eos=True)
    [own] = jax.device_get(replica.device.state.draft_laws)
    assert own.times != before.times and own.worth >= GAIN and own.times.plain > 0
    fixed = EngineConfig(draft="self", draft_length="fixed")
    draft = decoder_config(fixed, model.config, jnp.float32).draft
    assert draft is not None and draft.times is None

"""Drafts in the engine: what the clock says of them steers how much is drafted, and no completion."""

import jax
import jax.numpy as jnp
import pytest
from reopened import SIZES, bits, reopened

from et_jax.control.draft import StepTimes
from et_jax.control.draft_speed import RooflineLength
from et_jax.decode.drafting.drafts import Drafting, Pruned
from et_jax.serve import engine
from et_jax.serve.clocks.step_clock import GAIN, StepClock
from et_jax.serve.config import EngineConfig
from et_jax.serve.loading.sizing import decoder_config
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LIST = "The guests were these: Mr. Brown, Mrs. Brown, Miss Ada Brown, Mr. Grey. "


def without_drafts(done) -> list:
    """Every bit of completions but the charges and the counts of drafts."""
    return [bits(one, flops=0.0, drafted=0, accepted=False) for one in done]


@pytest.fixture(scope="module")
def for_itself():
    """A model that drafts for itself."""
    return engine.load(**SIZES | {"max_model_len": 192}, draft="self", draft_tokens=4)


def test_laws_set_by_the_clock_steer_how_much_is_drafted_and_no_completion(for_itself, monkeypatch):
    """If a drafted token takes no time many are drafted in a short completion, if it takes a step's time none is."""
    sampled = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=3, repetition_penalty=1.2)
    greedy = replace(sampled, temperature=0.0, repetition_penalty=1.0)
    requests = [
        GenerationRequest(prompt=LIST * 2 + "The guests were", params=greedy),
        GenerationRequest(prompt="It was late in", params=sampled),
    ]
    model, found = for_itself, {}
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

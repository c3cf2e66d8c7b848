"""Prompts read under a budget by the engine: the same text in company, what was read told, refusals in words."""

import json

import pytest
from reopened import SIZES, reopened

import et_jax
from et_jax import Controller, GenerationRequest, SamplingParams, UsageError, preset
from et_jax.control.budget import ConstantBudget, EntropyBudget

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LAW = EntropyBudget(tokens=16, segment=16, dense_until=16)
STORY = "Once upon a time there was a fox who lived by the river and went out every evening to look for supper. "
PROMPTS = [STORY + "He met a hen.", STORY * 2 + "The hen said,", "It was late.", STORY * 3 + "And then"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return et_jax.load(**SIZES, control=Controller(budget=LAW), audit=True)


@pytest.fixture(scope="module")
def together(model):
    return model.generate(PROMPTS, PARAMS)


def test_what_was_read_of_a_prompt_is_told(together):
    short, long = together[2], together[3]
    assert short.prompt_read.blocks_read == short.prompt_read.blocks_held and short.prompt_read.mass_kept is None
    assert long.prompt_read.blocks_read < long.prompt_read.blocks_held
    assert 0.2 < long.prompt_read.mass_kept < 1.0
    told = json.loads(json.dumps(long.to_dict()))["entropic"]
    assert told["prompt_share_read"] == long.prompt_read.blocks_read / long.prompt_read.blocks_held
    assert told["prompt_mass_kept"] == long.prompt_read.mass_kept


def test_pages_that_were_read_sparsely_are_not_shared(model):
    before = model.metrics.cached_prompt_tokens
    model.generate([STORY * 3, STORY * 3], PARAMS)
    assert model.metrics.cached_prompt_tokens == before


def test_pages_of_another_control_are_not_met(model, together):
    dense = model.generate(PROMPTS, PARAMS, control="off")
    assert all(one.prompt_read is None for one in dense)
    again = model.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in again] == [one.token_ids for one in together]
    assert model.decoder("off").config.chunk == et_jax.load(**SIZES).decoder_config.chunk


def test_preemption_changes_nothing(model, together):
    restless = reopened(model, preempt_every=2)
    again = restless.generate(PROMPTS, PARAMS)
    assert restless.metrics.preemptions > 0
    assert [one.token_ids for one in again] == [one.token_ids for one in together]


def test_a_budget_is_the_programs_not_a_requests(model):
    asked = GenerationRequest(prompt="It was", params=PARAMS, control={"tokens": 64})
    with pytest.raises(UsageError, match='control has no number "tokens" here'):
        model.generate([asked])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (dict(control=preset("entropyinfer", prefill_budget=15)), "less than a block of 16; choose a larger one"),
        (dict(control=Controller(budget=ConstantBudget(tokens=3))), "less than a block"),
        (dict(audit=True), "audit is for two models that take turns, and for prompts read in part"),
        (dict(control="entropyinfer", prefill_batch=32), "prefill_batch is 32, and this control reads segments of 512"),
    ],
)
def test_what_cannot_work_is_refused_in_a_sentence(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        et_jax.load(**SIZES | {"prefill_batch": None} | settings)


def test_a_budget_above_the_context_reads_everything():
    wide = et_jax.load(**SIZES | {"prefill_batch": None}, control=preset("entropyinfer", prefill_budget=4096))
    [done] = wide.generate(PROMPTS[3], PARAMS)
    assert done.prompt_read is not None
    assert done.prompt_read.blocks_read == done.prompt_read.blocks_held > 0

"""Budgets of the cache and of prompts in the engine: the same bits in any batch, pages that balance, refusals."""

import json

import pytest
from reopened import SIZES, asked, assert_balanced, bits, reopened

from et_jax.control.budget import ConstantBudget
from et_jax.control.controller import Controller
from et_jax.serve import engine
from et_jax.serve.totals import Totals

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SMALL = SIZES | {"page_size": 4, "cache_budget": 36, "max_model_len": 256, "num_pages": 91}


@pytest.fixture(scope="module")
def model():
    return engine.load(**SMALL, trace_reads=True)


def test_the_cache_of_a_long_sequence_stays_small(model):
    config, [request] = model.decoder_config, asked(model.tokenizer, 1, longer=12, max_tokens=200, temperature=0.0)
    [done] = model.generate([request])
    heads = config.model.num_layers * config.model.num_kv_heads
    room, every = config.layout.region, config.compression.every
    assert max(row.blocks_held for row in done.trace) <= heads * (room + -(-every // config.page_size) + 1)
    written = len(request.prompt) + len(done.token_ids) - 1
    left_out = config.compression.shift(len(request.prompt), written - 1, room * config.page_size)
    assert done.tokens_left_out == left_out > 0 and done.tokens_cached == written - left_out
    assert Totals.of([done]).tokens_cached == done.tokens_cached


def test_a_sequence_longer_than_the_pool_is_served(model):
    """It never has more than a region and a quarter, so 16 pages of 4 tokens do for 200 tokens and more."""
    request = asked(model.tokenizer, 1, longer=12, max_tokens=200)
    [done] = model.generate(request)
    assert all(sum(map(sum, row.reads)) == row.blocks_read for row in done.trace)
    short = engine.load(**SMALL | {"num_pages": 16}, trace_reads=True)
    assert [bits(one) for one in short.generate(request * 2)] == [bits(done)] * 2
    assert short.metrics.preemptions > 0
    assert_balanced(short)


def test_a_prompt_read_in_part_is_compressed_like_another():
    """Both halves of EntropyInfer: the bits are those of each alone, and the completion says what was left out."""
    control = Controller(budget=ConstantBudget(tokens=8, segment=16, dense_layers=0, dense_until=16))
    model = engine.load(**SMALL, control=control, audit=True)
    requests = asked(model.tokenizer, 3, longer=24, limit=40, more=36)
    together = model.generate(requests)
    assert [bits(one) for one in together] == [bits(reopened(model).generate([one])[0]) for one in requests]
    short, longest = together[0].prompt_read, together[-1].prompt_read
    assert short is not None and longest is not None and longest.mass_kept is not None
    assert short.blocks_read == short.blocks_held and short.mass_kept is None
    assert longest.blocks_read < longest.blocks_held and 0.1 < longest.mass_kept < 1.0
    said = json.loads(json.dumps(together[-1].to_dict()))["entropic"]
    assert said["prompt_share_read"] == longest.blocks_read / longest.blocks_held
    assert said["prompt_mass_kept"] == longest.mass_kept
    assert together[-1].tokens_left_out > 0
    [dense] = model.generate(requests[-1:], control="off")
    assert [row.entropy for row in dense.trace] != [row.entropy for row in together[-1].trace]
    assert dense.prompt_read is None and dense.tokens_left_out == together[-1].tokens_left_out
    assert_balanced(model)

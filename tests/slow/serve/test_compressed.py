"""A cache budget in the engine: texts that no company changes, pages that balance, refusals in a sentence."""

import pytest
from reopened import SIZES, assert_balanced, reopened

from et_jax.control.budget import ConstantBudget
from et_jax.control.compression import named
from et_jax.control.controller import Controller
from et_jax.control.select import Quest
from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.completions import Completion
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.totals import Totals

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SENTENCE = "It was in the spring of that year that the old house by the river was let again. "
SMALL = {"page_size": 4, "cache_budget": 36, "max_model_len": 256, "num_pages": 91}


@pytest.fixture(scope="module")
def model():
    return engine.load(**(SIZES | SMALL))


def asked(tokenizer, count: int = 7, **settings) -> list[GenerationRequest]:
    """Requests of several lengths, some of which begin alike, and which are compressed up to nine times."""
    tokens = tokenizer.encode(SENTENCE * 4)
    return [
        GenerationRequest(
            prompt=tuple(tokens[(i % 3) : 9 + 9 * i]),
            params=SamplingParams(**{"max_tokens": 40 + 12 * i, "seed": i, "ignore_eos": True} | settings),
        )
        for i in range(count)
    ]


def twins(tokenizer) -> list[GenerationRequest]:
    """Two requests of one prompt, of which all but two tokens are whole chunks of pages."""
    tokens = tuple(tokenizer.encode(SENTENCE * 4)[:50])
    return [
        GenerationRequest(prompt=tokens, params=SamplingParams(max_tokens=60, seed=seed, ignore_eos=True))
        for seed in (20, 21)
    ]


def text_of(completion: Completion):
    """All of a completion but what its company may change, its cost."""
    held = [row.blocks_held for row in completion.trace]
    return completion.text, completion.token_ids, completion.finish_reason, held, completion.tokens_left_out


def test_texts_are_the_same_alone_in_company_and_when_preempted(model):
    requests = [*asked(model.tokenizer), *twins(model.tokenizer)]
    together = [text_of(one) for one in model.generate(requests)]
    assert_balanced(model)
    alone = [text_of(reopened(model).generate([one])[0]) for one in requests]
    assert together == alone
    preempted = reopened(model, preempt_every=3)
    assert [text_of(one) for one in preempted.generate(requests)] == together
    assert preempted.metrics.preemptions > 5
    assert_balanced(preempted)
    without = reopened(model, prefix_cache=False)
    assert [text_of(one) for one in without.generate(requests)] == together
    assert model.metrics.cached_prompt_tokens > 0 == without.metrics.cached_prompt_tokens


def test_the_cache_of_a_long_text_stays_small_and_another_text_is_written(model):
    config, [request] = model.decoder_config, asked(model.tokenizer, 1, max_tokens=200, temperature=0.0)
    [done] = model.generate([request])
    heads = config.model.num_layers * config.model.num_kv_heads
    room, every = config.layout.region, config.compression.every
    assert max(row.blocks_held for row in done.trace) <= heads * (room + -(-every // config.page_size) + 1)
    written = len(request.prompt) + len(done.token_ids) - 1
    left_out = config.compression.shift(len(request.prompt), written - 1, room * config.page_size)
    assert done.tokens_left_out == left_out > 0 and done.tokens_cached == written - left_out
    assert Totals.of([done]).tokens_cached == done.tokens_cached
    [whole] = engine.load(**(SIZES | SMALL | {"cache_budget": None})).generate([request])
    assert whole.token_ids != done.token_ids and whole.tokens_left_out == 0
    first = config.compression.point(len(request.prompt), 0, room * config.page_size)
    same = first - len(request.prompt) + 1  # the last that was sampled from all there was
    assert whole.token_ids[:same] == done.token_ids[:same]


def test_a_text_longer_than_the_pool_is_served(model):
    """It never holds more than a region and a quarter, so 16 pages of 4 tokens do for 200 tokens and more."""
    request = asked(model.tokenizer, 1, max_tokens=200)
    expected = text_of(model.generate(request)[0])
    short = engine.load(**(SIZES | SMALL | {"num_pages": 16}))
    assert text_of(short.generate(request)[0]) == expected
    [one, two] = short.generate(request * 2)
    assert text_of(one) == text_of(two) == expected and short.metrics.preemptions > 0
    assert_balanced(short)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cache_budget": 33}, "cache_budget is 33; it must be a multiple of page_size, 4, above 32"),
        ({"cache_budget": 32}, "cache_budget is 32; it must be a multiple of page_size, 4, above 32"),
        ({"cache_budget": 0}, "cache_budget is 0; it must be at least 1."),
        ({"cache_budget": named("snapkv", 34)}, "cache_budget is 34; it must be a multiple of page_size, 4, above 32."),
        ({"cache_policy": "h2o"}, 'cache_policy is "h2o"; choose one of latent, snapkv, adakv, pyramidkv, streaming'),
        ({"cache_policy": "adakv", "cache_budget": None}, "cache_policy says what a cache_budget keeps; set that too"),
        ({"cache_policy": "adakv", "cache_budget": named("latent", 36)}, "cache_budget is a Compression, which has a"),
        ({"cache_policy": "adakv", "control": Controller(selector=Quest(3))}, "This control chooses blocks, and the"),
        ({"draft": "bundled-small"}, "cache_budget forgets what a second model has in the same pages, and draft names"),
        ({"small": "bundled-small", "control": "ead"}, "cache_budget forgets what a second model has in the same pag"),
        ({"control": Controller(selector=Quest(3), refresh_every=2)}, "cache_budget forgets tokens that this control"),
    ],
)
def test_what_does_not_go_with_a_budget_is_told(settings, said):
    with pytest.raises(UsageError) as refused:
        engine.load(**(SIZES | SMALL | settings))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)


def test_a_prompt_read_in_part_is_compressed_like_another():
    """Both halves of EntropyInfer: texts are those of each alone, and both tell what was left out."""
    control = Controller(budget=ConstantBudget(tokens=8, segment=16, dense_layers=1, dense_until=16))
    model = engine.load(**(SIZES | SMALL | {"control": control}))
    requests = asked(model.tokenizer)
    together = model.generate(requests)
    assert [text_of(one) for one in together] == [text_of(reopened(model).generate([one])[0]) for one in requests]
    longest = together[-1]
    assert longest.prompt_read is not None and longest.prompt_read.blocks_read < longest.prompt_read.blocks_held
    assert longest.tokens_left_out > 0
    [whole] = model.generate(requests[-1:], control="off")
    assert [row.entropy for row in whole.trace] != [row.entropy for row in longest.trace]
    assert whole.prompt_read is None and whole.tokens_left_out == longest.tokens_left_out
    assert_balanced(model)


def test_other_policies_serve_by_their_names_and_by_their_settings():
    """A name means the settings that a `Compression` of it would have, compressed again every quarter but by snapkv."""
    config = engine.load(**(SIZES | SMALL | {"cache_policy": "streaming"})).decoder_config
    assert config.compression == named("streaming", 36, every=9)
    config = engine.load(**(SIZES | SMALL | {"cache_policy": "snapkv"})).decoder_config
    assert config.compression == named("snapkv", 36)  # done once, by the queries of the prompt alone
    how = named("random", 40, window=8, every=8)
    model = engine.load(**(SIZES | SMALL | {"cache_budget": how}))
    assert model.decoder_config.compression == how
    [done] = model.generate(asked(model.tokenizer, 1, max_tokens=100))
    assert done.tokens_left_out > 0 and len(done.token_ids) == 100


def test_a_control_for_one_run_is_refused_likewise(model):
    with pytest.raises(UsageError, match=r"^cache_budget forgets tokens"):
        model.generate(["a"], control=Controller(selector=Quest(3), refresh_every=2))

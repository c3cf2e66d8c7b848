"""A module of the caller's own is served as the others are: the logits of its own pass, and every preset over them."""

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax import nnx
from own_modules import LENGTH, Grouped, Plain, own_logits

import et_jax
from et_jax.control.presets import preset
from et_jax.decode import snapshots
from et_jax.decode.request import request
from et_jax.errors import UsageError
from et_jax.models.bundled import bundled_folder
from et_jax.models.calibration import Calibration
from et_jax.models.module import ModuleConfig
from et_jax.serve.chunks import calls
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.text import load_tokenizer
from et_jax.types import Table

pytestmark = pytest.mark.usefixtures("hardly_optimised")

VOCABULARY = 4096
SENTENCE = "It was in the spring of that year that the old house by the river was let again. "
SIZES = {"max_num_seqs": 3, "page_size": 8, "prefill_batch": 32, "compilation_cache": None}
SENSITIVE = Calibration(sensitivity=Table(np.ones((2, 4, 1), np.float32)))
TOKENIZER = load_tokenizer(bundled_folder())


@functools.cache
def module(kind: Callable[..., nnx.Module]) -> nnx.Module:
    return kind(VOCABULARY, rngs=nnx.Rngs(3))


def loaded(kind: Callable[..., nnx.Module], *, calibration: Calibration = SENSITIVE, **settings) -> et_jax.Model:
    config = ModuleConfig(max_positions=LENGTH, eos_token_ids=(), calibration=calibration)
    return et_jax.load(module(kind), config=config, tokenizer=TOKENIZER, **SIZES | settings)


@pytest.fixture(scope="module")
def plain():
    return loaded(Plain)


@pytest.fixture(scope="module", params=[Plain, Grouped])
def served(request, plain):
    return request.param, plain if request.param is Plain else loaded(Grouped, calibration=Calibration())


def near(found, expected) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_logits_are_those_of_the_module_s_own_pass(served):
    kind, model = served
    d, prompt = model.decoder(keep=frozenset({"logits"})), TOKENIZER.encode(SENTENCE * 2)
    state = d.empty()
    for rows in calls(d.config, 0, prompt[:-1]):
        state, granted = d.prefill(model.weights, state, *rows)
        assert granted.all()
    found = [state.logits[0]]
    state = d.insert(state, 0, request(d.config, prompt, limit=20, seed=1))
    text = list(prompt)
    for _ in range(12):
        state, output = d.step(model.weights, state)
        assert output.produced[0, 0]
        found.append(state.logits[0])
        text.append(int(output.token[0, 0]))
    assert len(set(text[len(prompt) :])) > 6
    near(np.stack(found), own_logits(module(kind), text)[len(prompt) - 2 : -1])


def test_greedy_text_is_that_of_its_own_pass(served):
    kind, model = served
    [done] = model.generate("It was", max_tokens=20, temperature=0.0)
    text = [*TOKENIZER.encode("It was"), *done.token_ids]
    own = own_logits(module(kind), text)[-21:-1]
    assert len(set(done.token_ids)) > 2
    np.testing.assert_array_equal(done.token_ids, own.argmax(axis=-1))


def asked(count: int = 5, **settings) -> list[GenerationRequest]:
    tokens = TOKENIZER.encode(SENTENCE * 3)
    return [
        GenerationRequest(
            prompt=tuple(tokens[: 9 + 8 * i]),
            params=SamplingParams(**{"max_tokens": 10 + i, "seed": i, "temperature": 0.9} | settings),
        )
        for i in range(count)
    ]


def texts_of(done) -> list:
    """Every bit of the texts: logarithms of probabilities among it."""
    return [(one.token_ids, one.logprobs, [row.entropy for row in one.trace]) for one in done]


def test_no_company_and_no_kept_page_changes_a_bit(plain):
    requests = asked()
    together = texts_of(plain.generate(requests))
    assert [texts_of(plain.generate(one))[0] for one in requests] == together
    assert plain.metrics.cached_prompt_tokens > 0
    assert texts_of([event.completion for event in plain.stream(requests[0]) if event.completion]) == together[:1]
    assert dict((i, texts_of([one])[0]) for i, one in plain.as_completed(requests)) == dict(enumerate(together))


@pytest.mark.parametrize("name", ["off", "adaptive"])
def test_presets_run_over_it(plain, name):
    chosen = preset(name) if name == "off" else preset(name, min_blocks=1, window=8)
    for done in plain.generate(asked(3), control=chosen):
        assert done.finish_reason == "length" and all(np.isfinite(row.entropy) for row in done.trace)
        shares = [row.blocks_read / row.blocks_held for row in done.trace]
        assert all(0 < share <= 1 for share in shares) and (name != "off" or min(shares) == 1)


def test_a_proved_preset_that_leaves_nothing_unread_changes_no_greedy_text(plain):
    off = plain.generate(asked(temperature=0.0))
    whole = plain.generate(asked(temperature=0.0), control=preset("certified", tolerance=0.0))
    assert [one.token_ids for one in whole] == [one.token_ids for one in off]


def test_a_prompt_may_be_read_in_part(plain):
    [done] = plain.generate(asked()[-1:], control=preset("entropyinfer", prefill_budget=16))
    assert done.finish_reason == "length" and done.prompt_read is not None


def test_drafts_change_no_text(plain):
    """By lookups, and by a small model where these find nothing."""
    circle = GenerationRequest(prompt=SENTENCE * 2, params=SamplingParams(max_tokens=30, temperature=0.0))
    drafted = loaded(Plain, draft="lookup+bundled-small", draft_tokens=4, draft_length="fixed")
    requests = [*asked(3, temperature=0.0), circle]
    done = drafted.generate(requests)
    assert [one.token_ids for one in done] == [one.token_ids for one in plain.generate(requests)]
    assert sum(row.accepted for one in done for row in one.trace) > 0
    assert done[0].trace[0].drafted > 0  # after nine tokens that are all different


def test_a_cache_is_compressed():
    model = loaded(Plain, cache_budget=40)
    [done] = model.generate(asked(1, max_tokens=60))
    assert len(done.token_ids) == 60 and done.tokens_left_out > 0


class Counted(Plain):
    traces = 0

    def __call__(self, tokens, positions):
        Counted.traces += 1
        return super().__call__(tokens, positions)


def test_a_module_is_traced_once_for_a_program(plain):
    model = loaded(Counted)
    model.generate(asked(2))
    before = Counted.traces
    assert before > 0
    model.generate(asked(5, top_p=0.9))
    model.generate(asked(3), control=preset("off"))
    assert Counted.traces == before and model.metrics.programs_compiled_late == 0


def test_what_was_charged_is_what_the_module_holds(plain):
    [done] = plain.generate(asked(1))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(plain.params))
    plan = "\n".join(plain.describe())
    assert f"model Plain: Plain, 2 layers, {weights / 1e6:.1f} MB float32" in plan
    assert done.cost > 10 * weights and "step" in plan


def test_a_state_comes_back_from_disk(plain, tmp_path):
    d, prompt = plain.decoder(), TOKENIZER.encode(SENTENCE)
    state = d.empty()
    for rows in calls(d.config, 0, prompt[:-1]):
        state, _ = d.prefill(plain.weights, state, *rows)
    state = d.insert(state, 0, request(d.config, prompt, limit=20, seed=1))
    snapshots.save(tmp_path / "state", state)
    again = snapshots.restore(tmp_path / "state", jax.eval_shape(d.empty))
    one, other = (d.decode(plain.weights, each, 8)[1].token for each in (state, again))
    np.testing.assert_array_equal(one, other)


SHORT = ModuleConfig(max_positions=LENGTH)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "config is None; give a ModuleConfig(max_positions=...) with a module."),
        ({"config": SHORT}, "tokenizer is None; give a tokenizer.json, a folder, a tokenizers.Tokenizer, or another"),
        ({"config": SHORT, "tokenizer": TOKENIZER, "dtype": "float32"}, "dtype is float32; leave it out, for a module"),
        ({"config": SHORT, "tokenizer": TOKENIZER, "quantize": "int8"}, "quantize is int8; leave it out, for a module"),
        ({"config": SHORT, "tokenizer": TOKENIZER, "max_model_len": 97}, "max_model_len is 97; Plain was made for 96"),
        ({"config": SHORT, "tokenizer": TOKENIZER, "control": "adaptive"}, "Plain has no measured sensitivity of its"),
    ],
)
def test_what_a_module_lacks_is_said_in_one_sentence(settings, words):
    with pytest.raises(UsageError) as refusal:
        et_jax.load(module(Plain), **SIZES | settings)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(UsageError, match="has a vocabulary of 4000 tokens and the tokenizer one of 4096; give the"):
        et_jax.load(Plain(4000, rngs=nnx.Rngs(0)), config=SHORT, tokenizer=TOKENIZER, **SIZES)


def test_ids_beyond_the_vocabulary_are_refused():
    for name, value in {"bos_token_id": VOCABULARY, "eos_token_ids": (1, VOCABULARY)}.items():
        config = ModuleConfig(max_positions=LENGTH, **{name: value})
        with pytest.raises(
            UsageError, match=rf"of 4096 tokens, without the id 4096; give ModuleConfig\({name}=\.\.\.\)"
        ):
            et_jax.load(module(Plain), config=config, tokenizer=TOKENIZER, **SIZES)


@pytest.mark.parametrize("settings", [{"config": SHORT}, {"tokenizer": TOKENIZER}])
def test_a_named_model_brings_its_own(settings):
    with pytest.raises(UsageError, match="config and tokenizer go with a module; a named model brings its own"):
        et_jax.load("bundled-small", **settings)


def test_too_little_memory_is_told_without_a_remedy_that_does_not_help(plain, monkeypatch):
    found, least = plain._plan, LENGTH // SIZES["page_size"] + 1
    short = found.weights + found.state + found.step + least * found.page - 1  # enough for a cache of half the bytes
    monkeypatch.setattr("et_jax.serve.loading.usable_memory", lambda fraction: short)
    with pytest.raises(UsageError, match=r"^This needs .* may be used: .* for weights in float32") as refusal:
        loaded(Plain)
    said = str(refusal.value)  # a module keeps the dtype that it has, its cache may have another
    assert "take cache_dtype bfloat16" in said and "take max_num_seqs 2" in said and "take dtype" not in said

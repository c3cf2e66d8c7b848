"""What callers may hand over as prompts, settings and sizes: it works, or one sentence says what is wanted."""

import array
import asyncio
import collections
import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from et_jax.control.temperature import Thermostat
from et_jax.errors import UsageError
from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("as_users_have_it", "hardly_optimised")

BRIEF = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def model():
    return engine.load(max_num_seqs=3, max_model_len=64, prefill_batch=16)


class Text(str):
    """A text by another name."""


@pytest.mark.parametrize(
    ("make", "like"),
    [
        (lambda: Text("a"), ["a"]),
        (lambda: np.str_("a"), ["a"]),
        (lambda: (x for x in ["a", "b"]), ["a", "b"]),
        (lambda: ("a", "b"), ["a", "b"]),
        (lambda: np.array(["a", "b"]), ["a", "b"]),
        (lambda: np.array([5, 6]), [[5, 6]]),
        (lambda: collections.UserString("ab"), ["ab"]),
        (lambda: np.array("ab"), ["ab"]),
        (lambda: np.array([[5, 6], [7, 8]], np.uint8), [[5, 6], [7, 8]]),
        (lambda: [np.array([5, 6]), "a", (7,)], [[5, 6], "a", [7]]),
        (lambda: jax.numpy.array([5, 6]), [[5, 6]]),
        (lambda: [np.int64(5), 6], [[5, 6]]),
        (lambda: range(5, 8), [[5, 6, 7]]),
        (lambda: iter([5, 6]), [[5, 6]]),
        (lambda: [], []),
        (lambda: np.zeros((0, 3), int), []),
        (lambda: [GenerationRequest(prompt="a", params=BRIEF), "b"], ["a", "b"]),
    ],
)
def test_prompts_in_any_plain_shape_are_served(model, make, like):
    got, expected = model.generate(make(), max_tokens=2), model.generate(like, max_tokens=2)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        (None, "prompts is None; it must be a text, a list of token ids"),
        (5, "prompts is 5; .* write \\[5\\] for a prompt of this one token"),
        ({"a": 1}, "prompts is an object of type dict; .* write a list"),
        ({"a"}, "prompts is an object of type set; .* write a list"),
        (b"Once", 'prompts is b"Once"; .* decode the bytes first'),
        (Path("x"), "prompts is the path x; .* read the file first"),
        ([b"Once"], 'prompt is b"Once"; .* decode the bytes first'),
        ([5, "a"], 'prompt is 5; it must be a text or a list|prompt holds "a"'),
        (["a", 5], "prompt is 5; it must be a text or a list"),
        ([True, False], "prompt holds true"),
        ([1.5], "prompt holds 1.5"),
        (np.array([1.5]), "prompt holds 1.5"),
        (memoryview(b"Once"), "prompts is an object of type memoryview; .* decode the bytes first"),
        ([array.array("B", b"Once")], "prompt is an object of type array; .* decode the bytes first"),
        (np.zeros((2, 2, 2), int), "prompt holds a list"),
        ([None], "prompt is None"),
        ([[]], "The prompt is empty"),
        ("", "The prompt is empty"),
        (["a", [[]]], "prompt holds an empty list"),
        (object(), "prompts is an object of type object"),
        ("\ud800", "half of a surrogate pair"),
        (10**400, "prompts is a whole number of 1329 bits"),
    ],
)
@pytest.mark.parametrize("way", ["generate", "stream", "stream_async"])
def test_prompts_of_another_kind_are_told_what_is_wanted(model, prompts, sentence, way):
    async def first():
        return [event async for event in model.stream_async(prompts, max_tokens=1)]

    with pytest.raises(UsageError, match=sentence) as refused:
        asyncio.run(first()) if way == "stream_async" else list(getattr(model, way)(prompts, max_tokens=1))
    assert str(refused.value).endswith(".") and "\n" not in str(refused.value) and model.replicas().idle


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"max_token": 1}, "max_token is no setting; did you mean max_tokens?"),
        ({"controls": "off"}, "controls is no setting; did you mean control?"),
        ({"zzz": 1}, "zzz is no setting; choose from max_tokens, temperature"),
        ({"params": 5}, "params is 5; it must be SamplingParams"),
        ({"params": {"max_tokens": 1}}, "params is an object of type dict; it must be SamplingParams"),
        (
            {"control": 5},
            "one of off, paper, guarded, certified, adaptive, ead, ead_guarded, entropyinfer or a Controller",
        ),
        ({"control": lambda: Thermostat(1.0)}, "or a Controller; write Controller(law=...) for a law."),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number."),
    ],
)
def test_settings_that_are_none_are_told(model, arguments, sentence):
    arguments = {name: value() if name == "control" and callable(value) else value for name, value in arguments.items()}
    for way in (model.generate, model.stream):
        with pytest.raises(UsageError) as refused:
            way("a", **arguments)
        assert sentence in str(refused.value)


def test_keywords_change_the_settings_given_whole(model):
    params = SamplingParams(max_tokens=7, seed=3, temperature=0.8)
    both = model.generate("Once", params, max_tokens=2)
    assert [one.token_ids for one in both] == [
        one.token_ids for one in model.generate("Once", dataclasses.replace(params, max_tokens=2))
    ]


def test_settings_beside_requests_that_have_their_own_are_refused(model):
    request = GenerationRequest(prompt="a", params=BRIEF)
    for prompts, given in ((request, {"max_tokens": 1}), ([request, request], {"params": BRIEF})):
        with pytest.raises(UsageError, match=f"{next(iter(given))} is given with requests"):
            model.generate(prompts, **given)


@pytest.mark.parametrize("requests", [None, 5, "ab", b"ab", GenerationRequest(prompt="a", params=BRIEF)])
def test_what_holds_no_requests_is_refused_at_once(model, requests):
    with pytest.raises(UsageError, match=r"requests is .*; it must be a list of GenerationRequest"):
        model.as_completed(requests)


def test_one_that_is_no_request_is_answered_and_the_others_are_served(model):
    done = dict(model.as_completed([GenerationRequest(prompt="a", params=BRIEF), "b", None]))
    assert done[0].finish_reason == "length"
    sentence = 'requests[1] is "b"; it must be a GenerationRequest; write GenerationRequest(prompt=...).'
    assert done[1].error == sentence and done[2].error == "requests[2] is None; it must be a GenerationRequest."


def test_a_call_takes_none_for_unset_and_the_knobs_of_its_preset(model):
    unset = model.generate("Once", stop=None, seed=None, max_tokens=2, tolerance=None, control=None)
    assert unset == model.generate("Once", max_tokens=2)
    assert [event.text for event in model.stream("Once", max_tokens=2, cancelled=None)]
    asked = [GenerationRequest(prompt="a", params=BRIEF)]
    for call in (model.generate, model.stream, model.as_completed):
        with pytest.raises(UsageError, match=r'^control "off" has no tolerance; choose one of paper, guarded'):
            call(asked, tolerance=0.1)
        with pytest.raises(UsageError, match=r'^control "certified" has no tau; it has target_entropy, tolerance,'):
            call(asked, control="certified", tau=0.1)
    with pytest.raises(UsageError, match=r"^tolerence is no setting; did you mean tolerance[?]$"):
        model.as_completed(asked, tolerence=0.1)
    with pytest.raises(UsageError, match=r"^temperature is given with requests that have settings of their own"):
        model.as_completed(asked, temperature=0.1)


@pytest.mark.timeout(60)
def test_a_prompt_of_megabytes_is_refused_before_it_is_cut_into_tokens(model, monkeypatch):
    backend = type(model.tokenizer.backend)

    def encode(self, text, special):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(backend, "encode", encode)
    with pytest.raises(UsageError, match="The prompt has 5000000 bytes, and 64 tokens of this model stand for"):
        model.generate("Once " * 1_000_000)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [lambda: [5] * 30_000_000, lambda: np.full(30_000_000, 5), lambda: [[5] * 30_000_000]])
def test_a_prompt_of_millions_of_ids_is_refused_by_its_length(model, make):
    with pytest.raises(UsageError, match="The prompt has 30000000 tokens and at most 64 fit"):
        model.generate(make())


def test_a_text_that_fits_is_never_refused_by_its_bytes(model):
    """The longest tokens, and characters that normalise to one byte of four."""
    backend = model.tokenizer.backend
    by_length = sorted(range(model.config.vocab_size), key=lambda id: len(backend.decode([id]).encode()))
    longest = backend.decode([by_length[-1]])
    assert len(longest.encode()) <= model.tokenizer.longest_token
    for text in (longest * 10, "\N{MATHEMATICAL BOLD CAPITAL A}" * 10, " " * 50):
        assert len(model.generate(text, max_tokens=1)[0].token_ids) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": 5}, "name is 5; it must be a text."),
        ({"name": None}, "name is None; it must be a text."),
        ({"dtype": 5}, "dtype is 5; it must be a text."),
        ({"dtype": "int8"}, "dtype int8 is not supported"),
        ({"max_num_seqs": "8"}, 'max_num_seqs is "8"; it must be a whole number.'),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; it must be at least 1."),
        ({"max_num_seqs": 10**30}, "it must be at most 1048576."),
        ({"max_num_seqs": 2**20}, "This needs"),
        ({"replicas": 1.5}, "replicas is 1.5; it must be a whole number."),
        ({"page_size": True}, "page_size is true; it must be a whole number."),
        ({"page_size": -1}, "page_size is -1; it must be at least 1."),
        ({"max_model_len": 1.0}, "max_model_len is 1.0; it must be a whole number."),
        ({"num_pages": "x"}, 'num_pages is "x"; it must be a whole number.'),
        ({"max_resident_seqs": []}, "max_resident_seqs is an empty list; it must be a whole number."),
        ({"prefill_batch": b"1"}, 'prefill_batch is b"1"; it must be a whole number.'),
        ({"prefix_cache": 1}, "prefix_cache is 1; it must be true or false."),
        ({"preempt_every": -1}, "preempt_every is -1; it must be 0 (never) or above."),
        ({"memory_fraction": "x"}, 'memory_fraction is "x"; it must be a number.'),
        ({"memory_fraction": float("nan")}, "memory_fraction is nan; it must be a finite number."),
        ({"memory_fraction": 2}, "memory_fraction is 2"),
        ({"control": 5}, "control is 5; it must be one of"),
        ({"backend": "cuda"}, 'backend is "cuda"; choose one of reference, xla, gpu, tpu or None.'),
        ({"backend": 5}, "backend is 5; choose one of"),
        ({"progress": 5}, "progress is 5; it must be a function of one text."),
        ({"compilation_cache": 5}, "compilation_cache is 5; it must be a text."),
    ],
)
def test_arguments_of_load_are_told_what_is_wanted(arguments, sentence):
    with pytest.raises(UsageError) as refused:
        engine.load(**arguments)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_numbers_of_numpy_are_sizes(model):
    other = engine.load(max_num_seqs=np.int64(3), max_model_len=np.int32(64), prefill_batch=np.uint8(16))
    assert other.decoder_config == model.decoder_config


def test_a_folder_for_programs_that_cannot_be_written_is_refused_unless_nobody_asked_for_it(tmp_path, monkeypatch):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        (tmp_path / "file").write_text("")
        with pytest.raises(UsageError, match=r"compilation_cache is .*file/programs, which cannot be written"):
            engine.load(compilation_cache=tmp_path / "file/programs")
        monkeypatch.setenv("HOME", str(tmp_path / "file"))
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        told = []
        engine.load(max_num_seqs=3, max_model_len=64, progress=told.append)
        assert any("compiled programs are not kept" in line for line in told)
        assert jax.config.jax_compilation_cache_dir is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

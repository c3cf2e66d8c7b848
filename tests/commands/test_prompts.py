"""What callers may hand over as prompts, settings and sizes: it works, or one sentence says what is wanted."""

import asyncio

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


@pytest.mark.parametrize(
    ("make", "like"),
    [
        (lambda: (x for x in ["a", "b"]), ["a", "b"]),
        (lambda: np.array(["a", "b"]), ["a", "b"]),
        (lambda: np.array([5, 6]), [[5, 6]]),
        (lambda: np.array([[5, 6], [7, 8]], np.uint8), [[5, 6], [7, 8]]),
        (lambda: jax.numpy.array([5, 6]), [[5, 6]]),
        (lambda: iter([5, 6]), [[5, 6]]),
        (lambda: [], []),
        (lambda: [GenerationRequest(prompt="a", params=BRIEF), "b"], ["a", "b"]),
    ],
)
def test_prompts_in_any_plain_shape_are_served(model, make, like):
    got, expected = model.generate(make(), max_tokens=2), model.generate(like, max_tokens=2)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: None, "prompts is None; it must be a text, a list of token ids"),
        (lambda: 5, "prompts is 5; .* write \\[5\\] for a prompt of this one token"),
        (lambda: {"a": 1}, "prompts is an object of type dict; .* write a list"),
        (lambda: b"Once", 'prompts is b"Once"; .* decode the bytes first'),
        (lambda: [5, "a"], 'prompt is 5; it must be a text or a list|prompt holds "a"'),
        (lambda: "", r"^The prompt is empty; give it at least one character\.$"),
        (lambda: ["a", [[]]], "prompt holds an empty list"),
        (lambda: "\ud800", "half of a surrogate pair"),
        (lambda: [[1, 10**9, 5]], "token 1000000000, and .* has tokens 0 to"),
        (lambda: [[5] * 64], "The prompt has 64 tokens and .* has room for 64 with the text; shorten the prompt"),
    ],
)
def test_prompts_of_another_kind_are_told_what_is_wanted(model, make, sentence):
    async def first():
        return [event async for event in model.stream_async(make(), max_tokens=1)]

    for serve in (lambda: model.generate(make()), lambda: list(model.stream(make())), lambda: asyncio.run(first())):
        with pytest.raises(UsageError, match=sentence) as refused:
            serve()
        assert str(refused.value).endswith(".") and "\n" not in str(refused.value) and model.replicas().idle


REQUEST = GenerationRequest(prompt="a", params=BRIEF)


@pytest.mark.parametrize(
    ("prompts", "arguments", "sentence"),
    [
        ("a", {"max_token": 1}, "max_token is no setting; did you mean max_tokens?"),
        ("a", {"control": Thermostat(1.0)}, "or a Controller; write Controller(law=...) for a law."),
        ("a", {"stop_token_ids": (1, 2**40)}, "stop_token_ids has the token 1099511627776, and "),
        (REQUEST, {"max_tokens": 1}, "max_tokens is given with requests"),
    ],
)
def test_settings_that_are_none_are_told(model, prompts, arguments, sentence):
    for way in (model.generate, model.stream):
        with pytest.raises(UsageError) as refused:
            way(prompts, **arguments)
        assert sentence in str(refused.value)


def test_one_that_is_no_request_is_answered_and_the_others_are_served(model):
    done = dict(model.as_completed([GenerationRequest(prompt="a", params=BRIEF), "b", None]))
    assert done[0].finish_reason == "length"
    sentence = 'requests[1] is "b"; it must be a GenerationRequest; write GenerationRequest(prompt=...).'
    assert done[1].error == sentence and done[2].error == "requests[2] is None; it must be a GenerationRequest."


@pytest.mark.timeout(60)
def test_a_prompt_of_megabytes_is_refused_before_it_is_cut_into_tokens(model, monkeypatch):
    backend = type(model.tokenizer.backend)

    def encode(self, text, special):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(backend, "encode", encode)
    with pytest.raises(UsageError, match="The prompt has 5000000 bytes, and 64 tokens of this model stand for"):
        model.generate("Once " * 1_000_000)


def test_a_text_that_fits_is_never_refused_by_its_bytes(model):
    """The longest tokens, and characters that normalise to one byte of four."""
    backend = model.tokenizer.backend
    by_length = sorted(range(model.config.vocab_size), key=lambda id: len(backend.decode([id]).encode()))
    longest = backend.decode([by_length[-1]])
    assert len(longest.encode()) <= model.tokenizer.longest_token
    for text in (longest * 10, "\N{MATHEMATICAL BOLD CAPITAL A}" * 10, " " * 50):
        assert len(model.generate(text, max_tokens=1)[0].token_ids) == 1

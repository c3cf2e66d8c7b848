"""What a caller may ask for: every field against every kind of value, each answered by a request or one sentence."""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.errors import UsageError
from et_jax.serve.prompts import requests_of
from et_jax.serve.requests import MAX_STOP_IDS, MAX_STOP_LENGTH, MAX_STOPS, GenerationRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("as_users_have_it")


class Strange:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


HOSTILE = [
    *(True, False, 1.5, -1.5, "1", "", b"1", None, math.nan, math.inf, -math.inf, 1j, Strange(), Path("x"), range(3)),
    *([], [1.5], ["a", 1], ["a", None], [True], [[1]], {}, {"a": 1}, {1}, (b"a",), object, len, [Strange()], "\ud800"),
    *(10**400, -(10**400), 10**5000, 2**63, [10**5000], np.float64("nan"), np.array([1.5]), np.array([True])),
    *(np.array([[1]]), np.zeros(0), np.datetime64("2020-01-01"), np.str_("a"), np.bool_(True), jnp.float32(jnp.inf)),
    *(["\ud800"], ["a" * 5000], ["a"] * 5000, list(range(5000)), (x for x in "ab")),
]
WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "n", "best_of", "logprobs")
NUMBERS = (
    *("temperature", "top_p", "min_p", "top_n_sigma", "min_k", "typical_p", "eta_cutoff", "top_h"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
KINDS = {
    **dict.fromkeys(WHOLE, int),
    **dict.fromkeys(NUMBERS, float),
    **dict.fromkeys(("stop", "bad_words", "choice", "regex", "json_schema"), str),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), int),
    **dict.fromkeys(("p_less", "ignore_eos"), bool),
}


def refused_in_a_sentence(error: UsageError) -> bool:
    said = str(error)
    return said.endswith(".") and len(said) < 300 and "\n" not in said and "tuple" not in said


@pytest.mark.parametrize("field", KINDS)
def test_a_setting_is_of_its_type_or_refused_in_a_sentence(field):
    for number, value in enumerate(HOSTILE):
        try:
            params = SamplingParams(**{field: value})
        except UsageError as error:
            assert str(error).startswith(f"{field} ") and refused_in_a_sentence(error), number
            continue
        taken, kind = getattr(params, field), KINDS[field]
        if field in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "choice"):
            assert type(taken) is tuple and all(type(one) is kind for one in taken), number
        else:
            assert type(taken) is kind and (kind is str or abs(taken) < math.inf), number
        hash(params)


@pytest.mark.parametrize("field", ["prompt", "params", "priority", "deadline"])
def test_a_request_is_of_its_types_or_refused_in_a_sentence(field):
    for number, value in enumerate(HOSTILE):
        try:
            request = GenerationRequest(**{"prompt": "Once", "params": SamplingParams()} | {field: value})
        except UsageError as error:
            assert field in str(error) and refused_in_a_sentence(error), number
            continue
        assert type(request.prompt) is str or all(type(token) is int for token in request.prompt), number
        assert type(request.params) is SamplingParams
        assert type(request.priority) is float and math.isfinite(request.priority), number
        assert request.deadline is None or (type(request.deadline) is float and 0 < request.deadline < math.inf), number
        hash(request)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"stop": ["a"] * (MAX_STOPS + 1)}, f"stop has {MAX_STOPS + 1} texts; it may have {MAX_STOPS} at most."),
        (
            {"stop": ["b" * (MAX_STOP_LENGTH + 1)]},
            f"stop has a text of {MAX_STOP_LENGTH + 1} characters; each may have {MAX_STOP_LENGTH} at most.",
        ),
        ({"temperature": -0.1}, "temperature is -0.1; it must be 0 (greedy) or above."),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1 (off)."),
        ({"min_p": 1.5}, "min_p is 1.5; it must be from 0 (off) to 1."),
        ({"frequency_penalty": -3e38}, "frequency_penalty is -3e+38; it must be from -1000000 to 1000000 (0 is off)."),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be from 1/1000000 to 1000000 (1 is off)."),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9; it must be at most max_tokens, 8."),
        ({"logit_bias": [1]}, "logit_bias is a list; it must map token ids to numbers."),
        ({"logit_bias": {"a": 1}}, 'logit_bias holds "a"; it must be a mapping of token ids, integers.'),
        ({"logit_bias": {3: 2e6}}, "logit_bias[3] is 2000000.0; it must be from -1000000 to 1000000."),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias has 301 tokens; it may have 300 at most."),
        ({"bad_words": ["a"] * 33}, "bad_words has 33 texts; it may have 32 at most."),
        ({"regex": "a", "choice": ["b"]}, "regex is given with choice; a text follows one of them."),
        ({"regex": "a" * 131_073}, "regex has 131073 characters; it may have 131072 at most."),
        ({"choice": ["a", ""]}, "choice is a list; it must be a list of texts that are not empty."),
        (
            {"json_schema": {"a": math.nan}},
            "json_schema is an object of type dict; it must be an object, or the JSON of one.",
        ),
        ({"bad_words": [""]}, "bad_words is a list; it must be a list of texts that are not empty."),
        ({"n": 3, "best_of": 2}, "best_of is 2; it must be 1 (off), or at least n, 3."),
        ({"stop_token_ids": range(99)}, f"stop_token_ids has 99 ids; it may have {MAX_STOP_IDS} at most."),
    ],
)
def test_the_sentence_says_what_is_wanted(settings, sentence):
    with pytest.raises(UsageError) as refused:
        SamplingParams(**settings)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("field", KINDS)
def test_a_setting_that_is_none_is_not_set(field):
    assert SamplingParams(**{field: None}) == SamplingParams()
    before = SamplingParams(max_tokens=7, temperature=0.5, stop="a")
    assert requests_of("Once", before, {field: None}, 99) == [GenerationRequest(prompt="Once", params=before)]


def test_a_field_of_a_request_that_is_none_is_not_set():
    fields = ("params", "priority", "deadline", "control", "draft_tokens", "adapter")
    unset = GenerationRequest(prompt="Once", **dict.fromkeys(fields))
    assert unset == GenerationRequest(prompt="Once") == GenerationRequest(prompt="Once", params=SamplingParams())
    asked = GenerationRequest(prompt="Once", control={"tolerance": None, "window": 8})
    assert asked.control == {"window": 8}

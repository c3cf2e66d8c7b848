"""What a line asks for, and what is wrong with it."""

import json
from pathlib import Path
from typing import Any

import pytest
from stand_in import Letters

from et_jax.batch.fields import CHAT, COMPLETIONS
from et_jax.batch.tasks import Defaults, Task, ignored_fields, read_entries, read_task
from et_jax.errors import UsageError
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.text import Grammar

DEFAULTS = Defaults(params=SamplingParams(max_tokens=9, temperature=0.5))
USER = [{"role": "user", "content": "Hello"}]


def envelope(url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def task(path: Path, line: Any, defaults: Defaults = DEFAULTS) -> Task:
    (path / "in.jsonl").write_bytes(line if isinstance(line, bytes) else json.dumps(line).encode())
    (entry,) = read_entries(path / "in.jsonl")
    return read_task(entry, Letters(), defaults)


def text_of(request: GenerationRequest) -> str:
    return request.prompt if isinstance(request.prompt, str) else Letters().decode(request.prompt)


def test_a_completion_and_a_plain_line_are_read_alike(tmp_path):
    settings = {
        **{"prompt": "It was", "max_tokens": 3, "temperature": 0, "top_p": 0.9, "n": 2, "stop": "\n", "seed": 7},
        **{"presence_penalty": 1, "frequency_penalty": -0.5, "logprobs": 4, "top_k": 5, "min_p": 0.1},
        **{"top_n_sigma": 1, "min_k": 3, "typical_p": 0.9, "eta_cutoff": 0.01, "top_h": 0.4, "p_less": True},
        **{"logit_bias": {"5": -2, "7": 1.5}, "allowed_token_ids": [5, 7], "bad_words": ["x"], "min_tokens": 1},
        **{"repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": [1, 2], "priority": 3, "deadline": 2.5},
        **{"model": "any", "user": "me", "metadata": {"a": "b"}, "stream": False, "best_of": None},
        **{"control": {"tolerance": 0.1, "window": 8, "tau": None}, "adapter": "french"},
    }
    expected = GenerationRequest(
        prompt="It was",
        params=SamplingParams(
            **{"max_tokens": 3, "temperature": 0.0, "top_p": 0.9, "n": 2, "stop": ("\n",), "seed": 7},
            **{"presence_penalty": 1.0, "frequency_penalty": -0.5, "logprobs": 4, "top_k": 5, "min_p": 0.1},
            **{"top_n_sigma": 1.0, "min_k": 3.0, "typical_p": 0.9, "eta_cutoff": 0.01, "top_h": 0.4, "p_less": True},
            **{"logit_bias": {5: -2.0, 7: 1.5}, "allowed_token_ids": (5, 7), "bad_words": ("x",), "min_tokens": 1},
            **{"repetition_penalty": 1.2, "ignore_eos": True, "stop_token_ids": (1, 2)},
        ),
        priority=3.0,
        deadline=2.5,
        control={"tolerance": 0.1, "window": 8},
        adapter="french",
    )
    named, plain = task(tmp_path, envelope(COMPLETIONS, **settings)), task(tmp_path, settings)
    assert named.request == plain.request == expected
    assert named.wants_logprobs and not named.chat
    assert (named.entry.custom_id, plain.entry.custom_id) == ("a", "line-1")


def test_what_a_line_leaves_open_is_the_jobs(tmp_path):
    for line in ({"prompt": "It was"}, {"prompt": "It was", "temperature": None, "stop": None, "n": None}):
        request = task(tmp_path, line).request
        assert request == GenerationRequest(prompt="It was", params=DEFAULTS.params)
    assert task(tmp_path, {"prompt": [1, 2, 3]}).request.prompt == (1, 2, 3)


def test_the_grammar_of_a_line_stands_in_for_that_of_the_job(tmp_path):
    schema = {"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": ["é"]}}}
    text = '{"type": "object", "properties": {"b": {"type": "null"}, "a": {"enum": ["é"]}}}'
    strict = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    job = Defaults(params=SamplingParams(regex="[0-9]+"))
    for line, grammar in (
        ({}, Grammar("regex", "[0-9]+")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type": "object"}')),
        ({"response_format": strict}, Grammar("json_schema", text)),
        ({"json_schema": schema}, Grammar("json_schema", text)),
        ({"json_schema": text}, Grammar("json_schema", text)),
        ({"choice": ["yes", "né"]}, Grammar("choice", '["yes", "né"]')),
        ({"regex": "a", "response_format": None}, Grammar("regex", "a")),
    ):
        assert task(tmp_path, {"prompt": "It was"} | line, job).request.params.grammar == grammar


def test_a_conversation_goes_through_the_template(tmp_path):
    kind = Defaults(params=DEFAULTS.params, chat=True, system_prompt="Be kind.")
    given = task(tmp_path, envelope(CHAT, messages=USER, max_completion_tokens=4, logprobs=True, top_logprobs=2))
    assert text_of(given.request) == "user: Hello\n" and given.chat and given.wants_logprobs
    assert (given.request.params.max_tokens, given.request.params.logprobs) == (4, 2)
    assert text_of(task(tmp_path, {"messages": USER}, kind).request) == "system: Be kind.\nuser: Hello\n"
    own = [{"role": "system", "content": "Be curt."}, *USER]
    assert text_of(task(tmp_path, {"messages": own}, kind).request) == "system: Be curt.\nuser: Hello\n"
    plain = task(tmp_path, {"prompt": "Hello"}, kind)
    assert text_of(plain.request) == "system: Be kind.\nuser: Hello\n" and plain.chat
    assert task(tmp_path, envelope(COMPLETIONS, prompt="Hello"), kind).request.prompt == "Hello"
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert text_of(task(tmp_path, {"messages": [{"role": "user", "content": parts}]}).request) == "user: Hello\n"


REFUSED = [
    ({"messages": [{"role": "user", "content": "a"}], "echo": True}, "echo belongs to /v1/completions"),
    ({"prompt": "a", "prompt_logprobs": 3}, "prompt_logprobs is 3; it must be 0"),
    ({"prompt": "a", "prompt_logprobs": 0, "adapter": "b"}, "without adapters; leave adapter out."),
    ([1], "not a JSON object"),
    ({}, "prompt is missing"),
    ({"prompt": "a", "messages": USER}, "prompt and messages"),
    ({"prompt": "a", "custom_id": {}}, "custom_id is {}"),
    ({"prompt": "a", "id": "x" * 513}, "1 to 512 characters"),
    ({"prompt": "a\ud800"}, "surrogate"),
    (envelope(COMPLETIONS, prompt="a") | {"method": "GET"}, 'method is "GET"'),
    (envelope("/v1/embeddings", input="a"), f"must be {CHAT} or {COMPLETIONS}"),
    (envelope(COMPLETIONS) | {"body": "a"}, "body is not a JSON object"),
    (envelope(COMPLETIONS, prompt="a") | {"temperature": 1}, "temperature has no place beside"),
    (envelope(COMPLETIONS, messages=USER), "The body has messages and its url is /v1/completions"),
    (envelope(CHAT, prompt="a"), "The body has prompt and its url is /v1/chat/completions"),
    (envelope(CHAT, messages=[]), "messages is missing or empty"),
    (envelope(CHAT, messages=[USER[0] | {"tool_calls": [1]}]), "tool_calls, which is not supported"),
    (envelope(CHAT, messages=USER, logprobs=2), "logprobs is 2; it must be true or false"),
    (envelope(CHAT, messages=USER, max_tokens=1, max_completion_tokens=2), "differ"),
    ({"prompt": "a", "temprature": 1}, "temprature is not a field"),
    ({"prompt": "a", "response_format": "json"}, 'response_format is "json"; it must be {"type": "text"}, '),
    ({"prompt": "a", "response_format": {"type": "json_schema", "schema": {}}}, 'or {"type": "json_schema", '),
    ({"prompt": "a", "response_format": {"type": "text"}, "regex": "a"}, "response_format is given with regex; a text"),
    ({"prompt": "a", "json_schema": "{"}, 'json_schema is "{"; it must be an object, or the JSON of one.'),
    ({"prompt": "a", "regex": ["a"]}, 'regex is ["a"]; it must be a text.'),
    ({"prompt": "a", "choice": "a"}, 'choice is "a"; it must be a list of texts.'),
    ({"prompt": "a", "\x1b[2J\x9b": 1}, r"\x1b[2J\x9b is not a field"),
    ({"prompt": "a", "control": "guarded"}, 'control is "guarded"; it must be an object of numbers.'),
    ({"prompt": "a", "tolerance": 0.1}, 'a number of the controller; write it as "control": {"tolerance": ...}.'),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "it must map token ids to numbers"),
    ({"prompt": "a", "logit_bias": [5]}, "logit_bias is [5]; it must map token ids to numbers"),
    ({"prompt": "a", "logit_bias": {"5": "x"}}, "it must map token ids to numbers"),
    ({"prompt": "a", "logit_bias": {"5": 10**400}}, "logit_bias contains a number beyond all bounds"),
    ({"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "it must name each token once"),
    ({"prompt": "a", "bad_words": "x"}, 'bad_words is "x"; it must be a list of texts'),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens is 9; it must be at most max_tokens, 3."),
    (b"{", "is not JSON"),
    (b'{"prompt": "caf\xe9"}', "is not UTF-8"),
    (b'{"prompt": NaN}', "NaN is no number"),
    (b'{"n": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    (b'{"prompt": "a", "prompt": "b"}', 'has the key "prompt" twice'),
    (b'{"prompt": "a", "metadata": [{"b": {"c": 1, "d": 2, "c": 1}}]}', 'has the key "c" twice'),
    (b'{"\\u001b[2J": 1, "\\u001b[2J": 2}', r'has the key "\u001b[2J" twice'),
    (b'{"prompt": "a", "metadata": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 deep"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED)
def test_a_line_is_refused_in_one_sentence(tmp_path, line, words):
    with pytest.raises(UsageError) as refusal:
        task(tmp_path, line)
    said = str(refusal.value)
    assert words in said and said.endswith(".") and "\n" not in said and len(said) < 300


LINE = '{"id": "a", "prompt": "It was", "temperature": 0.5, "metadata": [{"b": 1, "c": {"d": 2, "e": 3}}, 4]}'


@pytest.mark.parametrize(
    ("spelled", "same"),
    [
        (LINE.replace(" ", "").replace("Itwas", "It was"), True),
        ('{"metadata": [{"c": {"e": 3, "d": 2}, "b": 1}, 4], "temperature": 0.5, "prompt": "It was", "id": "a"}', True),
        (LINE.replace("It was", "It\\u0020was").replace("0.5", "5e-1") + "\r", True),
        (LINE.replace("0.5", "0.6"), False),
        (LINE.replace("}}, 4]", "}}, 5]"), False),
        (
            '{"id": "a", "prompt": "It was", "temperature": 0.5, "metadata": [4, {"b": 1, "c": {"d": 2, "e": 3}}]}',
            False,
        ),
    ],
)
def test_the_id_is_of_what_a_line_says(tmp_path, spelled, same):
    (tmp_path / "one").write_text(LINE)
    (tmp_path / "two").write_text(spelled)
    ((one,), (two,)) = (read_entries(tmp_path / name) for name in ("one", "two"))
    assert (one.id == two.id) == same


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"id": None}, "line-1"),
        ({"custom_id": None, "id": 7}, "7"),
        ({"url": None, "method": None, "body": None}, "line-1"),
    ],
)
def test_null_is_as_good_as_absent(tmp_path, line, name):
    made = task(tmp_path, {"prompt": "a"} | line)
    assert made.entry.custom_id == name and made.request.prompt == "a"
    assert task(tmp_path, envelope(COMPLETIONS, prompt="a") | {"method": None, "id": None}).request.prompt == "a"


def test_the_second_line_of_a_name_is_the_bad_one(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "id": "\\u001b[2J"}\n' * 2)
    first, second = read_entries(tmp_path / "in.jsonl")
    assert (first.key, second.key) == ("\x1b[2J", 2) and first.id != second.id and first.problem is None
    assert r'custom_id "\u001b[2J" is that of line 1 already' in (second.problem or "")


IGNORED = {
    **{"reasoning_effort": "low", "verbosity": "high", "prompt_cache_key": "k", "safety_identifier": "s"},
    **{"prediction": {"type": "content", "content": "It was"}, "service_tier": "flex"},
    **{"prompt_cache_retention": "24h", "parallel_tool_calls": True},
}


@pytest.mark.parametrize("url", [COMPLETIONS, CHAT])
def test_fields_of_the_api_that_change_no_text_are_ignored_and_named(tmp_path: Path, url: str) -> None:
    body = {"prompt": "It was"} if url == COMPLETIONS else {"messages": USER}
    labels = {"model": "any", "user": "me", "web_search_options": None}
    plain, given = task(tmp_path, envelope(url, **body)), task(tmp_path, envelope(url, **body, **IGNORED, **labels))
    assert given.request == plain.request
    assert ignored_fields(given.entry) == IGNORED.keys() and ignored_fields(plain.entry) == set()
    assert ignored_fields(task(tmp_path, {"prompt": "a", "verbosity": None, "service_tier": "auto"}).entry) == {
        "service_tier"
    }

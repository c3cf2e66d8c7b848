"""Parses the fields of a line's body: each has a type, and one sentence that refuses another value."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from et_jax.batch.strict import shown
from et_jax.errors import UsageError
from et_jax.io.values import excerpt
from et_jax.serve.requests import MAX_STOP_IDS, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_N = 128  # as the OpenAI API documents
INTEGERS = {
    *("max_tokens", "min_tokens", "max_completion_tokens", "top_k", "n", "best_of", "seed", "top_logprobs"),
    "draft_tokens",
}
NUMBERS = {
    *("temperature", "top_p", "min_p", "top_n_sigma", "min_k", "typical_p", "eta_cutoff", "top_h"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("priority", "deadline"),
}


def _listed(body: Mapping[str, Any], name: str, kind: type, wanted: str) -> tuple[Any, ...]:
    if not isinstance(body[name], list) or not all(type(one) is kind for one in body[name]):
        raise UsageError(f"{name} is {shown(body[name])}; it must be a list of {wanted}.")
    return tuple(body[name])


def _biases(given: Any) -> dict[int, float]:
    """Return the biases of a line, whose token ids are strings in JSON."""
    fine = isinstance(given, dict) and all(token.isdecimal() and len(token) < 10 for token in given)
    if not fine or not all(type(bias) in (int, float) for bias in given.values()):
        raise UsageError(f'logit_bias is {shown(given)}; it must map token ids to numbers, as in {{"42": -1.5}}.')
    if len({int(token) for token in given}) < len(given):
        raise UsageError(f"logit_bias is {shown(given)}; it must name each token once.")
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except OverflowError as error:
        raise UsageError("logit_bias contains a number beyond all bounds; write a smaller one.") from error


def prompt_of(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    """Return the prompt of a line: a text, or token ids. Raises UsageError for another value."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        given = "missing" if prompt is None else shown(list(prompt) if isinstance(prompt, tuple) else prompt)
        raise UsageError(f"prompt is {given}; it must be a text that is not empty, or a list of token ids.")
    return prompt


def messages_of(body: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the messages of a line, their contents as texts. Raises UsageError for another value."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages is missing or empty; give a list of objects with role and content.")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    content = given.get("content")
    if isinstance(content, list):  # parts, of which only text is supported
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        only_texts = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if only_texts else None
    if not isinstance(given.get("role"), str) or not isinstance(content, str):
        raise UsageError(f"messages contains {shown(message)}; each must have a role and a content, both texts.")
    if strange := sorted(given.keys() - {"role", "content", "name"}):
        raise UsageError(f"messages contains {excerpt(strange[0])}, which is not supported here; leave it out.")
    return given | {"content": content}


def params_of(body: Mapping[str, Any], chat: bool, defaults: SamplingParams) -> tuple[SamplingParams, bool]:
    """Return the line's sampling settings, and whether its answer contains log-probabilities."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given: dict[str, Any] = {name: _integer(body, name) for name in sorted(INTEGERS & names & body.keys())}
    given |= {name: number_of(body, name) for name in sorted(NUMBERS & names & body.keys())}
    if "max_completion_tokens" in body:
        most = _integer(body, "max_completion_tokens")
        if given.setdefault("max_tokens", most) != most:
            raise UsageError("max_tokens and max_completion_tokens differ; give one of them.")
    for name in ("n", "best_of"):
        if not 1 <= given.get(name, 1) <= MAX_N:
            raise UsageError(f"{name} is {given[name]}; it must be from 1 to {MAX_N}.")
    if "stop" in body:
        stop = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {shown(stop)}; it must be a text or a list of texts, none of them empty.")
        given["stop"] = tuple(stop)
    if "stop_token_ids" in body:
        given["stop_token_ids"] = ids = _listed(body, "stop_token_ids", int, "token ids")
        if len(ids) > MAX_STOP_IDS:
            raise UsageError(f"stop_token_ids is {shown(list(ids))}; it may have at most {MAX_STOP_IDS} ids.")
    lists = (("allowed_token_ids", int, "token ids"), ("bad_words", str, "texts"), ("choice", str, "texts"))
    given |= _grammar(body)
    for name, kind, wanted in lists:
        if name in body:
            given[name] = _listed(body, name, kind, wanted)
    if "logit_bias" in body:
        given["logit_bias"] = _biases(body["logit_bias"])
    given |= {name: _boolean(body, name) for name in ("ignore_eos", "p_less") if name in body}
    wants_logprobs, given["logprobs"] = _logprobs(body, chat, defaults)
    return dataclasses.replace(defaults, **given), wants_logprobs


def prompt_answer_of(body: Mapping[str, Any], chat: bool) -> tuple[bool, bool]:
    """Return whether an answer begins with its prompt, and whether it has the log-probabilities of the prompt."""
    echo = "echo" in body and _boolean(body, "echo")
    if echo and chat:
        raise UsageError(f"echo belongs to {COMPLETIONS}; leave it out of a conversation.")
    if "prompt_logprobs" in body and (most := _integer(body, "prompt_logprobs")) != 0:
        raise UsageError(f"prompt_logprobs is {most}; it must be 0: the prompt's own tokens, without alternatives.")
    return echo, "prompt_logprobs" in body


def _grammar(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammar of a line, which replaces that of the job; a `response_format` of text means no grammar."""
    named = [name for name in ("response_format", "json_schema", "regex", "choice") if name in body]
    if len(named) > 1:
        raise UsageError(f"{named[0]} is given with {named[1]}; a text follows one of them.")
    none: dict[str, Any] = {"json_schema": "", "regex": "", "choice": ()}
    if named and named[0] == "response_format":
        return none | {"json_schema": _asked_schema(body["response_format"])}
    for name, kinds, wanted in (("json_schema", (dict, str), "an object"), ("regex", str, "a text")):
        if name in named and not isinstance(body[name], kinds):
            raise UsageError(f"{name} is {shown(body[name])}; it must be {wanted}.")
    return none | {name: body[name] for name in named if name != "choice"} if named else {}


def _asked_schema(given: Any) -> Any:
    """Return the schema of an OpenAI `response_format`, "" for text."""
    kind = given.get("type") if isinstance(given, dict) else None
    inner = given.get("json_schema") if kind == "json_schema" else None
    if kind == "text":
        return ""
    if kind == "json_object":
        return {"type": "object"}
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise UsageError(
            f'response_format is {shown(given)}; it must be {{"type": "text"}}, {{"type": "json_object"}} or '
            '{"type": "json_schema", "json_schema": {"schema": {...}}}.'
        )
    return inner["schema"]


def _logprobs(body: Mapping[str, Any], chat: bool, defaults: SamplingParams) -> tuple[bool, int]:
    """Return whether log-probabilities are requested, and the number of alternatives, in the format of the url."""
    if not chat:
        if "top_logprobs" in body:
            raise UsageError(f"top_logprobs belongs to {CHAT}; here logprobs is the number of alternatives.")
        return ("logprobs" in body), (_integer(body, "logprobs") if "logprobs" in body else defaults.logprobs)
    shown = "logprobs" in body and _boolean(body, "logprobs")
    if "top_logprobs" in body and not shown:
        raise UsageError("top_logprobs needs logprobs to be true.")
    return shown, (_integer(body, "top_logprobs") if "top_logprobs" in body else defaults.logprobs)


def _integer(body: Mapping[str, Any], name: str) -> int:
    if type(body[name]) is not int or abs(body[name]) >= 2**64:
        raise UsageError(f"{name} is {shown(body[name])}; it must be a whole number below 2^64.")
    return body[name]


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    if not isinstance(body[name], bool):
        raise UsageError(f"{name} is {shown(body[name])}; it must be true or false.")
    return body[name]


def control_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the controller numbers that a line sets, None if it sets none. Raises UsageError for another value."""
    value = body.get("control")
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"control is {shown(value)}; it must be an object of numbers.")
    return None if value is None else {name: number for name, number in value.items() if number is not None}


def number_of(body: Mapping[str, Any], name: str) -> float | None:
    """Return a field that is a number, None if it is absent. Raises UsageError for another value."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or abs(value) > 3e38:
        raise UsageError(f"{name} is {shown(value)}; it must be a number.")
    return float(value)

"""Parses a line of input into a request, or an error message.

Two formats are supported. OpenAI's: `{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {...}}`
(https://platform.openai.com/docs/guides/batch). And plain: `{"prompt": "It was", "temperature": 0.7}` or
`{"messages": [...]}`, named by its `custom_id` or `id`, otherwise by its line number. In both the job's settings
replace those that are absent or null.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from et_jax.batch.lines import MAX_LINE_BYTES, Line, read_lines
from et_jax.batch.strict import parse, shown
from et_jax.control.presets import KNOBS
from et_jax.errors import UsageError
from et_jax.io.values import excerpt
from et_jax.serve.requests import MAX_STOP_IDS, GenerationRequest, SamplingParams

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_N = 128  # as the OpenAI API documents
_NAMES = frozenset({"custom_id", "id"})
_MAX_NAME = 512  # characters of a custom_id
_ENVELOPE = {"custom_id", "method", "url", "body"}
_INTEGERS = {"max_tokens", "min_tokens", "max_completion_tokens", "top_k", "n", "seed", "top_logprobs", "draft_tokens"}
_NUMBERS = {
    *("temperature", "top_p", "min_p", "top_n_sigma", "typical_p", "eta_cutoff", "top_h"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("priority", "deadline"),
}
_OTHERS = {"prompt", "messages", "adapter", "control", "stop", "stop_token_ids", "ignore_eos", "p_less", "logprobs"} | {
    *("logit_bias", "allowed_token_ids", "bad_words"),
    *("response_format", "json_schema", "regex", "choice"),
}
SETTINGS = frozenset(_INTEGERS | _NUMBERS | _OTHERS) - {"prompt", "messages"}
"""The settings that a line may have beside its prompt."""
_LABELS = {"model", "user", "metadata", "store"}
# Fields of the API that are not supported and do not change the text. The summary names those that a job has.
_IGNORED = {
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    *("reasoning_effort", "verbosity", "prediction"),
}
# Fields that are supported only with the value that has no effect.
_NEUTRAL = {
    **{"stream": False, "stream_options": {}, "echo": False, "best_of": 1, "suffix": ""},
    **{"tools": [], "tool_choice": "none", "modalities": ["text"]},
    **{"web_search_options": None},
}


@runtime_checkable
class ChatTokenizer(Protocol):
    """The part of a tokenizer that tasks require."""

    @property
    def chat_template(self) -> str | None: ...
    def chat(
        self,
        messages: list[dict[str, str]],
        system_prompt: str | None = None,
        *,
        allow_special_tokens: bool = False,
    ) -> list[int]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """A line with its name: `values` is its object, or `problem` says why there is none.

    `custom_id` is None if the line has no valid name; its line number is used instead. `id` also depends on the
    content: a line that was changed has a different one.
    """

    line: int
    custom_id: str | None
    id: str
    values: dict[str, Any]
    problem: str | None = None

    @property
    def key(self) -> str | int:
        """The key of this line's row in the journal."""
        return self.line if self.custom_id is None else self.custom_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Defaults:
    """The command's settings for every line: sampling, and the system prompt.

    With `chat` a plain prompt is a user's message. `system_prompt` starts every conversation that does not start with a
    system message. Special tokens spelled in a message are plain text, unless `allow_special_tokens`. Prompts are in
    `prompt_column`, if it is given.
    """

    params: SamplingParams
    chat: bool = False
    system_prompt: str | None = None
    allow_special_tokens: bool = False
    prompt_column: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A valid entry with its request, and the format of its answer."""

    entry: Entry
    request: GenerationRequest
    chat: bool
    wants_logprobs: bool


def read_entries(path: Path, column: str | None = None) -> Iterator[Entry]:
    """Yield every line of the input with its name; a duplicate name is a problem of the later line.

    If `column` is given, it has the prompt, or a conversation, and columns that are not settings are ignored. Names are
    stored in memory, lines are not.
    """
    seen: dict[str, int] = {}
    for line in read_lines(path, column, SETTINGS | _NAMES):
        values, content, name, problem = {}, line.digest, None, None
        try:
            values, content = _object(line)
            values = values if column is None else _with_prompt(values, column)
            name = _name(values, line.number)
            if name in seen:
                raise UsageError(
                    f"custom_id {shown(name)} is that of line {seen[name]} already; give every line its own."
                )
            seen[name] = line.number
        except UsageError as error:
            name, problem = None, str(error)
        key = json.dumps(line.number if name is None else name).encode()
        digest = hashlib.blake2b(content + key, digest_size=12).hexdigest()
        yield Entry(line=line.number, custom_id=name, id=f"batch_req_{digest}", values=values, problem=problem)


def ignored_fields(entry: Entry) -> set[str]:
    """Return the names of a line's fields that are not supported and do not change the text."""
    values = entry.values.get("body") if _is_envelope(entry.values) else entry.values
    return (
        {name for name in _IGNORED & values.keys() if values[name] is not None} if isinstance(values, dict) else set()
    )


def read_task(entry: Entry, tokenizer: ChatTokenizer, defaults: Defaults) -> Task:
    """Return the request of a line. Raises UsageError, one sentence for its error row."""
    if entry.problem is not None:
        raise UsageError(entry.problem)
    body, chat = _body(entry.values)
    for field, value in body.items():
        if field in _NEUTRAL and value != _NEUTRAL[field]:
            raise UsageError(f"{field} is {shown(value)}, which is not supported here; leave it out.")
        if field in KNOBS:
            raise UsageError(f'{field} is a number of the controller; write it as "control": {{"{field}": ...}}.')
        if field not in _INTEGERS | _NUMBERS | _OTHERS | _LABELS | _IGNORED | _NEUTRAL.keys():
            raise UsageError(f"{excerpt(field)} is not a field that is known here; leave it out, or correct its name.")
    params, wants_logprobs = _params(body, chat, defaults.params)
    priority, deadline = _number(body, "priority"), _number(body, "deadline")
    prompt = None if chat else _prompt(body)
    if isinstance(prompt, str) and defaults.chat and not _is_envelope(entry.values):
        chat, body = True, {"messages": [{"role": "user", "content": prompt}]}
    if chat:
        prompt = _conversation(_messages(body), tokenizer, defaults)
    request = GenerationRequest(
        prompt=prompt,
        params=params,
        priority=priority or 0.0,
        deadline=deadline,
        control=_control(body),
        draft_tokens=body.get("draft_tokens"),
        adapter=body.get("adapter"),
    )
    return Task(entry=entry, request=request, chat=chat, wants_logprobs=wants_logprobs)


def _object(line: Line) -> tuple[dict[str, Any], bytes]:
    """Return the object on a line without null values, and a digest that does not depend on its formatting."""
    if line.problem is not None:
        raise UsageError(line.problem)
    if line.data is None:
        raise UsageError(f"The line has more than {MAX_LINE_BYTES} bytes; shorten its prompt.")
    try:
        values = parse(line.data.decode("utf-8"))
        spelled = json.dumps(values, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"The line is not UTF-8 (byte {error.start + 1}); save the file as UTF-8.") from error
    except UnicodeEncodeError as error:
        raise UsageError("The line holds half of a surrogate pair; write the character whole.") from error
    except ValueError as error:
        raise UsageError(f"The line is not JSON ({excerpt(str(error), 200)}); mend it.") from error
    if not isinstance(values, dict):
        raise UsageError("The line is not a JSON object; write one as {...}.")
    given = {name: value for name, value in values.items() if value is not None}
    return given, hashlib.blake2b(spelled, digest_size=16).digest()


def _with_prompt(values: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Return a plain line with the value of a column as its prompt."""
    if column not in values:
        raise UsageError(f"{excerpt(column)}, which --prompt-column names, is missing; give the line one.")
    given, prompt = {name: values[name] for name in (SETTINGS | _NAMES) & values.keys() - {column}}, values[column]
    turns = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
    return given | {"messages" if turns else "prompt": prompt}


def _is_envelope(values: Mapping[str, Any]) -> bool:
    return not values.keys().isdisjoint({"body", "url", "method"})


def _name(values: Mapping[str, Any], number: int) -> str:
    """Return the line's name; a plain line without a name is named by its line number."""
    name = values.get("custom_id")
    if name is None and not _is_envelope(values):
        name = values.get("id", f"line-{number}")
        name = str(name) if type(name) is int else name
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
        given = "missing" if name is None else shown(name)
        raise UsageError(f"custom_id is {given}; give the line a text of 1 to {_MAX_NAME} characters.")
    return name


def _body(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the settings of a line that are not null, and whether it is a conversation."""
    if not _is_envelope(values):
        body = {name: value for name, value in values.items() if name not in ("custom_id", "id")}
        chat = body.get("messages") is not None
        if chat and body.get("prompt") is not None:
            raise UsageError("The line has prompt and messages; give one of them.")
    else:
        if strange := sorted(values.keys() - _ENVELOPE):
            raise UsageError(f"{excerpt(strange[0])} has no place beside custom_id and body; move it into the body.")
        if values.get("method", "POST") != "POST":
            raise UsageError(f"method is {shown(values['method'])}; it must be POST.")
        if values.get("url") not in (CHAT, COMPLETIONS):
            raise UsageError(f"url is {shown(values.get('url'))}; it must be {CHAT} or {COMPLETIONS}.")
        body, chat = values.get("body"), values["url"] == CHAT
        if not isinstance(body, dict):
            raise UsageError("body is not a JSON object; write it as {...}.")
        wrong, right = ("prompt", "messages") if chat else ("messages", "prompt")
        if body.get(wrong) is not None:
            raise UsageError(f"The body has {wrong} and its url is {values['url']}, which takes {right}.")
    return {name: value for name, value in body.items() if value is not None}, chat


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
        raise UsageError("logit_bias holds a number beyond all bounds; write a smaller one.") from error


def _prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, str | tuple) or not prompt:
        given = "missing" if prompt is None else shown(list(prompt) if isinstance(prompt, tuple) else prompt)
        raise UsageError(f"prompt is {given}; it must be a text that is not empty, or a list of token ids.")
    return prompt


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UsageError("messages is missing or empty; give a list of objects with role and content.")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, str]:
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    content = given.get("content")
    if isinstance(content, list):  # parts, of which only text is supported
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        whole = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if whole else None
    if not isinstance(given.get("role"), str) or not isinstance(content, str):
        raise UsageError(f"messages holds {shown(message)}; each must have a role and a content, both texts.")
    if strange := sorted(given.keys() - {"role", "content", "name"}):
        raise UsageError(f"messages holds {excerpt(strange[0])}, which is not supported here; leave it out.")
    return given | {"content": content}


def _conversation(messages: list[dict[str, str]], tokenizer: ChatTokenizer, defaults: Defaults) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        raise UsageError(f"This model has no chat template; send a prompt to {COMPLETIONS}, or choose a chat model.")
    opening = None if messages[0]["role"] == "system" else defaults.system_prompt
    return tuple(tokenizer.chat(messages, opening, allow_special_tokens=defaults.allow_special_tokens))


def _params(body: Mapping[str, Any], chat: bool, defaults: SamplingParams) -> tuple[SamplingParams, bool]:
    """Return the line's sampling settings, and whether its answer contains log-probabilities."""
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    given: dict[str, Any] = {name: _integer(body, name) for name in sorted(_INTEGERS & names & body.keys())}
    given |= {name: _number(body, name) for name in sorted(_NUMBERS & names & body.keys())}
    if "max_completion_tokens" in body:
        most = _integer(body, "max_completion_tokens")
        if given.setdefault("max_tokens", most) != most:
            raise UsageError("max_tokens and max_completion_tokens differ; give one of them.")
    if not 1 <= given.get("n", 1) <= MAX_N:
        raise UsageError(f"n is {given['n']}; it must be from 1 to {MAX_N}.")
    if "stop" in body:
        stop = [body["stop"]] if isinstance(body["stop"], str) else body["stop"]
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise UsageError(f"stop is {shown(stop)}; it must be a text or a list of texts, none of them empty.")
        given["stop"] = tuple(stop)
    if "stop_token_ids" in body:
        ids = body["stop_token_ids"]
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise UsageError(f"stop_token_ids is {shown(ids)}; it must be a list of token ids.")
        if len(ids) > MAX_STOP_IDS:
            raise UsageError(f"stop_token_ids is {shown(ids)}; it may hold at most {MAX_STOP_IDS} ids.")
        given["stop_token_ids"] = tuple(ids)
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


def _control(body: Mapping[str, Any]) -> dict[str, Any] | None:
    value = body.get("control")
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"control is {shown(value)}; it must be an object of numbers.")
    return None if value is None else {name: number for name, number in value.items() if number is not None}


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or abs(value) > 3e38:
        raise UsageError(f"{name} is {shown(value)}; it must be a number.")
    return float(value)

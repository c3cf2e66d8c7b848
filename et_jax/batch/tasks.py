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

from et_jax.batch.fields import (
    CHAT,
    COMPLETIONS,
    INTEGERS,
    NUMBERS,
    control_of,
    messages_of,
    number_of,
    params_of,
    prompt_answer_of,
    prompt_of,
)
from et_jax.batch.lines import MAX_LINE_BYTES, Line, read_lines
from et_jax.batch.strict import parse, shown
from et_jax.control.presets import KNOBS
from et_jax.errors import UsageError
from et_jax.io.values import excerpt
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.scoring import Score

_NAMES = frozenset({"custom_id", "id"})
_MAX_NAME = 512  # characters of a custom_id
_ENVELOPE = {"custom_id", "method", "url", "body"}
_OTHERS = {"prompt", "messages", "adapter", "control", "stop", "stop_token_ids", "ignore_eos", "p_less", "logprobs"} | {
    *("logit_bias", "allowed_token_ids", "bad_words", "echo", "prompt_logprobs"),
    *("response_format", "json_schema", "regex", "choice"),
}
SETTINGS = frozenset(INTEGERS | NUMBERS | _OTHERS) - {"prompt", "messages"}
"""The settings that a line may have beside its prompt."""
_LABELS = {"model", "user", "metadata", "store"}
# Fields of the API that are not supported and do not change the text. The summary names those that a job has.
_IGNORED = {
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    *("reasoning_effort", "verbosity", "prediction"),
}
# Fields that are supported only with the value that has no effect.
_NEUTRAL = {
    **{"stream": False, "stream_options": {}, "suffix": ""},
    **{"tools": [], "tool_choice": "none", "modalities": ["text"]},
    **{"web_search_options": None},
}


@runtime_checkable
class ChatTokenizer(Protocol):
    """The part of a tokenizer that tasks require."""

    @property
    def chat_template(self) -> str | None: ...
    def chat(
        self, messages: list[dict[str, str]], system_prompt: str | None = None, *, allow_special_tokens: bool = False
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
    """A valid entry with its request, and the format of its answer.

    With `echo` the text of the answer begins with the prompt. `prompt_score` is that of the prompt, if the line asks
    for its log-probabilities and the model has scored it.
    """

    entry: Entry
    request: GenerationRequest
    chat: bool
    wants_logprobs: bool
    echo: bool = False
    prompt_logprobs: bool = False
    prompt_score: Score | None = None

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer contains log-probabilities of the prompt."""
        return self.prompt_logprobs or (self.echo and self.wants_logprobs)


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
        if field not in INTEGERS | NUMBERS | _OTHERS | _LABELS | _IGNORED | _NEUTRAL.keys():
            raise UsageError(f"{excerpt(field)} is not a field that is known here; leave it out, or correct its name.")
    params, wants_logprobs = params_of(body, chat, defaults.params)
    priority, deadline = number_of(body, "priority"), number_of(body, "deadline")
    prompt = None if chat else prompt_of(body)
    if isinstance(prompt, str) and defaults.chat and not _is_envelope(entry.values):
        chat, body = True, {"messages": [{"role": "user", "content": prompt}]}
    if chat:
        prompt = _conversation(messages_of(body), tokenizer, defaults)
    request = GenerationRequest(
        prompt=prompt,
        params=params,
        priority=priority or 0.0,
        deadline=deadline,
        control=control_of(body),
        draft_tokens=body.get("draft_tokens"),
        adapter=body.get("adapter"),
    )
    echo, prompt_logprobs = prompt_answer_of(body, chat)
    task = Task(
        entry=entry,
        request=request,
        chat=chat,
        wants_logprobs=wants_logprobs,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
    )
    if task.scores_prompt and request.adapter is not None:
        raise UsageError("Log-probabilities of a prompt are those of the model without adapters; leave adapter out.")
    return task


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
        raise UsageError("The line contains half of a surrogate pair; write the full character.") from error
    except ValueError as error:
        raise UsageError(f"The line is not JSON ({excerpt(str(error), 200)}); correct it.") from error
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


def _conversation(messages: list[dict[str, str]], tokenizer: ChatTokenizer, defaults: Defaults) -> tuple[int, ...]:
    if tokenizer.chat_template is None:
        raise UsageError(f"This model has no chat template; send a prompt to {COMPLETIONS}, or choose a chat model.")
    opening = None if messages[0]["role"] == "system" else defaults.system_prompt
    return tuple(tokenizer.chat(messages, opening, allow_special_tokens=defaults.allow_special_tokens))

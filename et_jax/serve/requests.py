"""Sampling settings and generation requests, validated in full when they are created."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from et_jax.control.controller import Controller
from et_jax.control.draft import MOST_DRAFTED
from et_jax.decode.sampling.steering import MOST_BIASED, MOST_WORDS
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.text import Grammar

MAX_N = 1024  # continuations of one prompt
MAX_STOPS = 64  # stop strings of a request
MAX_STOP_LENGTH = 1024  # characters of each; these limits keep the search for them far below a token's time
MAX_STOP_IDS = 8
MAX_LOGPROBS = 20
MAX_WORDS = MOST_WORDS // 2  # each is forbidden with a space before it too
MAX_GRAMMAR = 2**17  # characters of a schema, of a regular expression, or of all texts of a choice
MAX_PENALTY = 1_000_000  # enough to forbid or force a token, and far from the limits of float32
_TEXTS = "a text or a list of texts that are not empty"
_PROMPT = "a text or a list of token ids"


_COUNTS: dict[str, tuple[int, int | None, str]] = {
    "max_tokens": (1, None, ""),
    "top_k": (0, None, "0 (off) or above"),
    "seed": (0, 2**63 - 1, "from 0 to 2^63 - 1"),
    "n": (1, MAX_N, ""),
    "best_of": (1, MAX_N, ""),
    "logprobs": (0, MAX_LOGPROBS, ""),
    "min_tokens": (0, None, "0 (off) or above"),
}
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "0 (greedy) or above"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (off)"),
    "min_p": (lambda x: 0 <= x <= 1, "from 0 (off) to 1"),
    "top_n_sigma": (lambda x: 0 <= x <= 1000, "from 0 (off) to 1000"),
    "min_k": (lambda x: 0 <= x <= 1e6, "from 0 (off) to a million"),
    "typical_p": (lambda x: 0 < x <= 1, "above 0 and at most 1 (off)"),
    "eta_cutoff": (lambda x: 0 <= x < 1, "from 0 (off) to below 1"),
    "top_h": (lambda x: 0 <= x <= 1, "from 0 (off) to 1 (off)"),
    "repetition_penalty": (
        lambda x: 1 / MAX_PENALTY <= x <= MAX_PENALTY,
        f"from 1/{MAX_PENALTY} to {MAX_PENALTY} (1 is off)",
    ),
    "presence_penalty": (lambda x: abs(x) <= MAX_PENALTY, f"from -{MAX_PENALTY} to {MAX_PENALTY} (0 is off)"),
    "frequency_penalty": (lambda x: abs(x) <= MAX_PENALTY, f"from -{MAX_PENALTY} to {MAX_PENALTY} (0 is off)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other penalties 0 are
    off. So are `top_n_sigma` 0 (its paper uses 1), `min_k` 0 (3), `typical_p` 1 (0.95), `eta_cutoff` 0 (0.0009),
    `top_h` 0 (0.4) and `p_less` False, which `decode.sampling.truncation.truncate` defines. Penalties are at most a
    million; `repetition_penalty` is at least a millionth. `stop` strings end the text and are removed from it. So do
    `stop_token_ids` and the model's own end tokens, which `ignore_eos` disables. `n` continuations are sampled, each
    with its own key derived from `seed`. With `best_of` above 1 that many are sampled, and the `n` of the greatest mean
    log-probability per token are returned, when all have ended. `logprobs` is the number of alternatives to return per
    token.

    End tokens and `stop_token_ids` are not sampled before `min_tokens`. `logit_bias` is added to the logits of the
    tokens that it names. If `allowed_token_ids` is not empty, only these tokens are sampled. The tokenizations of
    `bad_words`, with and without a leading space, are never completed; other tokens may spell the same word.

    At most one grammar constrains the text: `json_schema`, an object or its JSON, to a JSON value; `regex`, in the
    syntax of Rust's crate of that name; `choice`, to one of these texts. See `text.grammar`.

    Numpy numbers and lists are converted to plain ones, a single stop string to a tuple. A field that is None gets its
    default. Raises UsageError for a value of another type or out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    min_k: float = 0.0
    typical_p: float = 1.0
    eta_cutoff: float = 0.0
    top_h: float = 0.0
    p_less: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    n: int = 1
    best_of: int = 1
    logprobs: int = 0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    json_schema: str | Mapping[str, Any] = ""
    regex: str = ""
    choice: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        values.fill_unset(self)
        for name, (least, most, wanted) in _COUNTS.items():
            object.__setattr__(self, name, values.integer(name, getattr(self, name), least, most, wanted))
        for name, (fine, wanted) in _NUMBERS.items():
            value = values.number(name, getattr(self, name))
            if not fine(value):
                raise UsageError(f"{name} is {value}; it must be {wanted}.")
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens is {values.shown(self.min_tokens)}; it must be at most max_tokens, {self.max_tokens}."
            )
        if 1 < self.best_of < self.n:
            raise UsageError(f"best_of is {self.best_of}; it must be 1 (off), or at least n, {self.n}.")
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        for name in ("ignore_eos", "p_less"):
            object.__setattr__(self, name, values.boolean(name, getattr(self, name)))
        object.__setattr__(self, "json_schema", _schema(self.json_schema))
        object.__setattr__(self, "regex", _regex(self.regex))
        object.__setattr__(self, "choice", _choice(self.choice))
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        if len(given) > 1:
            raise UsageError(f"{given[0]} is given with {given[1]}; a text follows one of them.")

    @property
    def sampled(self) -> int:
        """The number of continuations that are sampled, of which `n` are returned."""
        return max(self.n, self.best_of)

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that constrains the text, or None."""
        if self.choice:
            return Grammar("choice", json.dumps(self.choice, ensure_ascii=False))
        if self.regex:
            return Grammar("regex", self.regex)
        return Grammar("json_schema", str(self.json_schema)) if self.json_schema else None


def _schema(given: Any) -> str:
    """Return a schema as JSON on one line, with its keys in their order."""
    given = values.plain(given)
    if given == "" and isinstance(given, str):
        return ""
    try:
        found = json.loads(given) if isinstance(given, str) else given
        text = json.dumps(found if isinstance(found, dict) else dict(found), ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"json_schema is {values.shown(given)}; it must be an object, or the JSON of one.") from error
    return _sized("json_schema", text)


def _regex(given: Any) -> str:
    regex = values.plain(given)
    if not isinstance(regex, str) or values.broken_at(regex) is not None:
        raise UsageError(f"regex is {values.shown(regex)}; it must be a regular expression, a text.")
    return _sized("regex", regex)


def _choice(given: Any) -> tuple[str, ...]:
    texts = values.plain(given)
    fine = values.is_list(texts) and all(isinstance(text, str) and text for text in texts)
    if not fine or any(values.broken_at(text) is not None for text in texts):
        raise UsageError(f"choice is {values.shown(texts)}; it must be a list of texts that are not empty.")
    _sized("choice", "".join(texts))
    return tuple(map(values.plain, texts))


def _sized(name: str, text: str) -> str:
    if len(text) > MAX_GRAMMAR:
        raise UsageError(f"{name} has {len(text)} characters; it may have {MAX_GRAMMAR} at most.")
    return text


def _stops(given: Any) -> tuple[str, ...]:
    stops = values.plain(given)
    stops = [stops] if isinstance(stops, str) else stops
    if not values.is_list(stops):
        raise UsageError(f"stop is {values.shown(stops)}; it must be {_TEXTS}.")
    if len(stops) > MAX_STOPS:
        raise UsageError(f"stop has {len(stops)} texts; it may have {MAX_STOPS} at most.")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise UsageError(f"stop has {values.shown(text)}; it must be {_TEXTS}.")
        if len(text) > MAX_STOP_LENGTH:
            raise UsageError(f"stop has a text of {len(text)} characters; each may have {MAX_STOP_LENGTH} at most.")
    return tuple(map(values.plain, stops))


def _stop_ids(given: Any) -> tuple[int, ...]:
    ids = values.plain(given)
    if not values.is_list(ids):
        raise UsageError(f"stop_token_ids is {values.shown(ids)}; it must be a list of token ids.")
    if len(ids) > MAX_STOP_IDS:
        raise UsageError(f"stop_token_ids has {len(ids)} ids; it may have {MAX_STOP_IDS} at most.")
    return values.ids("stop_token_ids", ids, "a list of token ids")


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    with contextlib.suppress(TypeError, ValueError):
        given = dict(given) if isinstance(given, tuple | list) else given
    if not isinstance(given, Mapping):
        raise UsageError(f"logit_bias is {values.shown(given)}; it must map token ids to numbers.")
    if len(given) > MOST_BIASED:
        raise UsageError(f"logit_bias has {len(given)} tokens; it may have {MOST_BIASED} at most.")
    found = {}
    for token, bias in given.items():
        [token] = values.ids("logit_bias", [token], "a mapping of token ids")
        number = values.number(f"logit_bias[{token}]", bias)
        if not abs(number) <= MAX_PENALTY:
            raise UsageError(f"logit_bias[{token}] is {number}; it must be from -{MAX_PENALTY} to {MAX_PENALTY}.")
        found[token] = number
    return tuple(found.items())


def _allowed(given: Any) -> tuple[int, ...]:
    ids = values.plain(given)
    if not values.is_list(ids):
        raise UsageError(f"allowed_token_ids is {values.shown(ids)}; it must be a list of token ids.")
    return values.ids("allowed_token_ids", ids, "a list of token ids")


def _bad_words(given: Any) -> tuple[str, ...]:
    words = values.plain(given)
    if not values.is_list(words) or not all(isinstance(word, str) and word for word in words):
        raise UsageError(f"bad_words is {values.shown(words)}; it must be a list of texts that are not empty.")
    if len(words) > MAX_WORDS:
        raise UsageError(f"bad_words has {len(words)} texts; it may have {MAX_WORDS} at most.")
    return tuple(map(values.plain, words))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A prompt, as text or token ids, with its sampling settings, priority, deadline and control.

    A request of higher `priority` is scheduled sooner; `deadline` is in seconds from submission. Ids may be any list or
    array of integers and become a tuple. A field, or a number of `control`, that is None gets its default. `control`
    sets numbers of the controller for this request only: by name, as `{"tolerance": 0.1}` (see
    `control.settings.adjusted`), or as a controller that differs only in numbers. At most `draft_tokens` tokens are
    drafted per step: 0 for none, None for the engine's number. `adapter` names an adapter that the model was loaded
    with.

    Raises UsageError for a value of another type, a priority that is not a number, or a deadline that is not positive.
    """

    prompt: str | Sequence[int]
    params: SamplingParams = SamplingParams()
    priority: float = 0.0
    deadline: float | None = None
    control: Controller | Mapping[str, Any] | None = None
    draft_tokens: int | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        values.fill_unset(self)
        object.__setattr__(self, "prompt", _prompt(self.prompt))
        if self.control is not None and not isinstance(self.control, Controller):
            object.__setattr__(self, "control", _numbers(self.control))
        if not isinstance(self.params, SamplingParams):
            raise UsageError(f"params is {values.shown(self.params)}; it must be SamplingParams(...).")
        object.__setattr__(self, "priority", values.number("priority", self.priority))
        if self.deadline is not None:
            deadline = values.number("deadline", self.deadline)
            if not deadline > 0:
                raise UsageError(f"deadline is {deadline}; it must be a number of seconds above 0.")
            object.__setattr__(self, "deadline", deadline)
        if self.adapter is not None and not isinstance(self.adapter, str):
            raise UsageError(f"adapter is {values.shown(self.adapter)}; it must be the name of one.")
        if self.draft_tokens is not None:
            number = values.integer("draft_tokens", self.draft_tokens, 0, MOST_DRAFTED)
            object.__setattr__(self, "draft_tokens", number)


def _numbers(given: Any) -> dict[str, int | float]:
    """Return numbers by name as plain numbers, without those that are None; an integer stays an integer."""
    if not isinstance(given, Mapping):
        raise UsageError(f"control is {values.shown(given)}; it must be a Controller, or numbers by name.")
    numbers = {}
    for name, number in given.items():
        if number is None:
            continue
        checked = values.number(f"control.{values.excerpt(name)}", number)
        numbers[name] = int(checked) if isinstance(values.plain(number), int) else checked
    return numbers


def _prompt(given: Any) -> str | tuple[int, ...]:
    prompt = values.plain(given)
    if isinstance(prompt, str):
        at = values.broken_at(prompt)
        if at is not None:
            raise UsageError(f"prompt has half of a surrogate pair at character {at + 1}; write the full character.")
        return prompt
    if values.is_list(prompt):
        return values.ids("prompt", prompt, _PROMPT)
    advice = ", so decode the bytes first" if values.is_bytes(prompt) else ""
    advice = ", so read the file first" if isinstance(prompt, PurePath) else advice
    raise UsageError(f"prompt is {values.shown(prompt)}; it must be {_PROMPT}{advice}.")

"""Converts a caller's prompts and settings into requests, and a request into its sequences."""

import dataclasses
import difflib
from collections import UserString
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import jax

from et_jax.control.controller import Controller
from et_jax.control.presets import KNOBS
from et_jax.control.settings import adjusted
from et_jax.decode.config import DecoderConfig
from et_jax.decode.sampling.steering import WORD_TOKENS, allowed_bits
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.serve.completions import Completion, TokenEvent
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.serve.sequence import Sequence, Text
from et_jax.text import Grammars, Tokenizer
from et_jax.text.grammar import Matcher

_BYTES_PER_BYTE = 4  # a tokenizer's normaliser may map up to 4 bytes to a byte: full-width letters, styled digits
_WANTED = "a text, a list of token ids, a GenerationRequest, or a list of those"
_SETTINGS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_OTHERS = ("control", "progress", "cancelled", *KNOBS)


def requests_of(
    prompts: Any, params: SamplingParams | None, settings: Mapping[str, Any], most: int
) -> list[GenerationRequest]:
    """Return a request for each prompt; prompts that are requests are returned unchanged.

    The others get the settings of `params`, replaced by those of `settings` that are not None. A list of integers, or
    an array of one axis, is a single prompt. Raises UsageError for anything else, and for more than `most` ids before
    it reads them.
    """
    settings = {name: value for name, value in settings.items() if value is not None or name not in _SETTINGS}
    asked = _params(params, settings)
    given = _prompts(prompts, most)
    if given and (params is not None or settings) and all(isinstance(one, GenerationRequest) for one in given):
        name = next(iter(settings), "params")
        raise UsageError(f"{name} is given with requests that have settings of their own; set it in those.")
    return [one if isinstance(one, GenerationRequest) else _request(one, asked, most) for one in given]


def sequences_of(
    request: GenerationRequest,
    prompt_index: int,
    *,
    grammars: Grammars,
    config: DecoderConfig,
    name: str,
    adapters: tuple[str, ...] = (),
) -> list[Sequence]:
    """Return the sequences that a request to model `name` samples, not submitted yet.

    `prompt_index` numbers the request. They run under `config.controller`, with the request's own numbers if it has
    any. `adapters` are the names of the loaded adapters.

    Raises UsageError if the model cannot run the request.
    """
    prompt, params, length, tokenizer = request.prompt, request.params, config.max_length, grammars.tokenizer
    laws, adapter = _laws(config.controller, request.control), request.adapter
    if adapter is not None and adapter not in adapters:
        there = f"choose from {', '.join(map(values.excerpt, adapters))}" if adapters else "load it with adapters"
        raise UsageError(f"adapter is {values.shown(adapter)}, which {name} was not loaded with; {there}.")
    ids = prompt_ids(prompt, tokenizer, config, name)
    _check_ids("stop_token_ids has", params.stop_token_ids, config.model.vocab_size, name)
    if len(ids) >= length:
        raise UsageError(
            f"The prompt has {len(ids)} tokens and {name} has room for {length} with the text; "
            "shorten the prompt or raise max_model_len if the model allows it."
        )
    limit = min(params.max_tokens, length - len(ids))
    most, how, layout = len(ids) - 1 + limit, config.compression, config.layout
    if how is not None and layout is not None:
        most = how.most_cached(len(ids), most, layout.region * config.page_size)
    pages = -(-most // config.page_size)
    if pages > config.num_pages - 1:
        raise UsageError(
            f"The prompt of {len(ids)} tokens and {limit} more need {pages} pages of {config.page_size} "
            f"tokens and the cache has {config.num_pages - 1}; raise num_pages, or lower max_tokens."
        )
    text = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
    stop_ids = (*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eos_ids))
    bad_words = _steered(params, stop_ids, tokenizer, config.model.vocab_size, name)

    def matcher() -> Matcher | None:
        if params.grammar is None:
            return None
        own = allowed_bits(config.model.vocab_size, params.allowed_token_ids or None, bad_words)
        return grammars.matcher(params.grammar, own, forces=not params.allowed_token_ids and not bad_words)

    return [
        Sequence(
            request=request,
            laws=laws,
            adapter=0 if adapter is None else 1 + adapters.index(adapter),
            prompt=text,
            prompt_ids=ids,
            prompt_index=prompt_index,
            index=index,
            limit=limit,
            stop_ids=stop_ids,
            bad_words=bad_words,
            matcher=matcher(),
            text=Text(tokenizer, params.stop),
        )
        for index in range(params.sampled)
    ]


def _steered(
    params: SamplingParams, stop_ids: tuple[int, ...], tokenizer: Tokenizer, vocab_size: int, name: str
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the words that a request forbids. Raises UsageError if it permits no token."""
    _check_ids("logit_bias names", dict(params.logit_bias), vocab_size, name)
    _check_ids("allowed_token_ids has", params.allowed_token_ids, vocab_size, name)
    found = dict.fromkeys(
        tuple(tokenizer.backend.encode(form, special=False))
        for word in params.bad_words
        for form in (word, f" {word.lstrip()}")
    )
    for word in found:
        if len(word) > WORD_TOKENS:
            raise UsageError(
                f"bad_words has {values.shown(tokenizer.decode(word))}, which is {len(word)} tokens of {name}; "
                f"each may be {WORD_TOKENS} at most."
            )
    never = {word[0] for word in found if len(word) == 1} | (set(stop_ids) if params.min_tokens else set())
    if params.allowed_token_ids and never.issuperset(params.allowed_token_ids):
        raise UsageError("allowed_token_ids has no token that bad_words and min_tokens leave; allow another token.")
    return tuple(found)


def prompt_ids(
    prompt: str | tuple[int, ...], tokenizer: Tokenizer, config: DecoderConfig, name: str, *, opening: bool = True
) -> list[int]:
    """Return the token ids of a prompt of model `name`; without `opening` no begin token is added to a text.

    Raises UsageError for a prompt that is empty, has ids outside the model's vocabulary, or is too long.
    """
    if isinstance(prompt, str):
        check_bytes(prompt, tokenizer.longest_token, config.max_length)
        ids = tokenizer.encode(prompt) if opening else tokenizer.backend.encode(prompt, special=False)
    else:
        check_length(len(prompt), config.max_length)
        ids = list(prompt)
    if not prompt or not ids:
        raise UsageError("The prompt is empty; give it at least one character.")
    _check_ids("The prompt has", ids, config.model.vocab_size, name)
    return ids


def refused(prompt_index: int, request: Any, sentence: str) -> TokenEvent:
    """Return the only event of an invalid request, with `sentence` as its error."""
    completion = Completion(
        prompt=request.prompt if isinstance(request, GenerationRequest) and isinstance(request.prompt, str) else "",
        prompt_tokens=0,
        index=0,
        text="",
        token_ids=(),
        finish_reason="error",
        trace=(),
        error=sentence,
    )
    return TokenEvent(prompt_index=prompt_index, index=0, text="", trace=None, completion=completion)


def _laws(controller: Controller, asked: Controller | Mapping[str, int | float] | None) -> Controller:
    """Return the controller of a request: the common one, with the request's own numbers if it has any."""
    if asked is None:
        return controller
    if not isinstance(asked, Controller):
        return adjusted(controller, asked)
    if jax.tree.structure(asked) != jax.tree.structure(controller):
        raise UsageError(
            "control is a controller of another structure than the one that serves; give one that differs in "
            "numbers alone, or serve this request in a call of its own, with `control=` there."
        )
    return asked


def _check_ids(what: str, ids: Iterable[int], vocab_size: int, name: str) -> None:
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise UsageError(
            f"{what} the token {values.shown(outside)}, and {name} has tokens 0 to "
            f"{vocab_size - 1}; take ids of this model's own tokenizer."
        )


def check_length(num_ids: int, most: int) -> None:
    """Raise UsageError for a prompt of more than `most` ids."""
    if num_ids > most:
        raise UsageError(f"The prompt has {num_ids} tokens and at most {most} fit with the text; shorten the prompt.")


def check_bytes(text: str, longest_token: int, most: int) -> None:
    """Raise UsageError for a text of more bytes than `most` tokens of `longest_token` bytes can encode.

    The bound is loose, because a tokenizer may normalise four bytes to one before it splits the text.
    """
    num_bytes, bound = len(text.encode()), most * longest_token * _BYTES_PER_BYTE
    if num_bytes > bound:
        raise UsageError(
            f"The prompt has {num_bytes} bytes, and {most} tokens of this model stand for {bound} at the very most; "
            "shorten the prompt."
        )


def as_request(index: int, value: Any) -> GenerationRequest:
    """Return `value`, item `index` of the requests. Raises UsageError if it is not a GenerationRequest."""
    if not isinstance(value, GenerationRequest):
        advice = "; write GenerationRequest(prompt=...)" if isinstance(value, str) else ""
        raise UsageError(f"requests[{index}] is {values.shown(value)}; it must be a GenerationRequest{advice}.")
    return value


def split_knobs(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a call into the knobs of presets and the other settings."""
    of_preset = {name: value for name, value in settings.items() if name in KNOBS}
    return of_preset, {name: value for name, value in settings.items() if name not in KNOBS}


def check_knobs(settings: Mapping[str, Any]) -> None:
    """Raise UsageError for a keyword that is not a preset's knob; requests have their own sampling settings."""
    for name in settings:
        if name in _SETTINGS:
            raise UsageError(f"{name} is given with requests that have settings of their own; set it in those.")
        if name not in KNOBS:
            near = difflib.get_close_matches(name, (*KNOBS, "control", "cancelled"), n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from control, cancelled, {', '.join(KNOBS)}."
            raise UsageError(f"{name} is no setting; {advice}")


def _params(params: Any, settings: Mapping[str, Any]) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(f"params is {values.shown(params)}; it must be SamplingParams(...).")
    for name in settings:
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, (*_SETTINGS, *_OTHERS), n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join((*_SETTINGS, *_OTHERS))}."
            raise UsageError(f"{name} is no setting; {advice}")
    return dataclasses.replace(params or SamplingParams(), **settings)


def _prompts(prompts: Any, most: int) -> list[Any]:
    """Return the prompts of any accepted container as a list."""
    if isinstance(prompts, str | GenerationRequest):
        return [prompts]
    if getattr(prompts, "ndim", 0) == 1:
        check_length(len(prompts), most)
    given = list(prompts) if isinstance(prompts, Iterator) else values.plain(prompts)
    if isinstance(given, str):
        return [given]
    if not values.is_list(given):
        advice = ""
        if values.is_bytes(given):
            advice = "; decode the bytes first"
        elif type(given) is int:
            advice = f"; write [{given}] for a prompt of this one token" if abs(given) < 2**63 else ""
        elif isinstance(given, Set | Mapping):
            advice = "; write a list, which has an order"
        elif hasattr(given, "__fspath__"):
            advice = "; read the file first"
        raise UsageError(f"prompts is {values.shown(given)}; it must be {_WANTED}{advice}.")
    if len(given) and all(_is_id(one) for one in (given[0], given[-1])):
        check_length(len(given), most)
        return [given]
    return list(given)


def _is_id(value: Any) -> bool:
    return type(values.plain(value)) in (int, bool, float)


def _request(prompt: Any, params: SamplingParams, most: int) -> GenerationRequest:
    if hasattr(prompt, "__len__") and not isinstance(prompt, str | UserString):
        check_length(len(prompt), most)
    return GenerationRequest(prompt=prompt, params=params)

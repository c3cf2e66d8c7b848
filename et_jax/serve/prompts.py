"""What callers may hand over as prompts and settings, made into requests."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Set
from typing import Any

from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.serve.requests import GenerationRequest, SamplingParams

_BYTES_PER_BYTE = 4  # a tokenizer's normaliser may write one byte for so many: full-width letters, styled digits
_WANTED = "a text, a list of token ids, a GenerationRequest, or a list of those"
_SETTINGS = tuple(field.name for field in dataclasses.fields(SamplingParams))
_OTHERS = ("control", "progress", "cancelled")


def requests_of(
    prompts: Any, params: SamplingParams | None, settings: Mapping[str, Any], most: int
) -> list[GenerationRequest]:
    """Return a request for each prompt; a request among them stands as it is.

    The settings of `params` are those of all others, changed by `settings`. A list of whole numbers, or an
    array of one axis, is one prompt. Raises UsageError for anything else, and for ids in number above
    `most`, before they are looked at.
    """
    asked = _params(params, settings)
    given = _prompts(prompts, most)
    if given and (params is not None or settings) and all(isinstance(one, GenerationRequest) for one in given):
        name = next(iter(settings), "params")
        raise UsageError(f"{name} is given beside requests that have settings of their own; set it in those.")
    return [one if isinstance(one, GenerationRequest) else _request(one, asked, most) for one in given]


def check_length(num_ids: int, most: int) -> None:
    """Raise UsageError where a prompt has more ids than fit in any case."""
    if num_ids > most:
        raise UsageError(f"The prompt has {num_ids} tokens and at most {most} fit with the text; shorten the prompt.")


def check_bytes(text: str, longest_token: int, most: int) -> None:
    """Raise UsageError where a text has more bytes than `most` tokens of `longest_token` bytes could stand for.

    It is generous: a tokenizer may normalise four bytes to one before it cuts the text.
    """
    num_bytes, bound = len(text.encode()), most * longest_token * _BYTES_PER_BYTE
    if num_bytes > bound:
        raise UsageError(
            f"The prompt has {num_bytes} bytes, and {most} tokens of this model stand for {bound} at the very most; "
            "shorten the prompt."
        )


def as_request(value: Any) -> GenerationRequest:
    """Return `value`, which is a request. Raises UsageError where it is not."""
    if not isinstance(value, GenerationRequest):
        raise UsageError(f"requests holds {values.shown(value)}; it must hold GenerationRequest(...) alone.")
    return value


def _params(params: Any, settings: Mapping[str, Any]) -> SamplingParams:
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(f"params is {values.shown(params)}; it must be SamplingParams(...).")
    for name in settings:
        if name not in _SETTINGS:
            near = difflib.get_close_matches(name, (*_SETTINGS, *_OTHERS), n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(_SETTINGS)}."
            raise UsageError(f"{name} is no setting; {advice}")
    return dataclasses.replace(params or SamplingParams(), **settings)


def _prompts(prompts: Any, most: int) -> list[Any]:
    """Return the prompts one by one, whatever held them."""
    if isinstance(prompts, str | GenerationRequest):
        return [prompts]
    if getattr(prompts, "ndim", 0) == 1:
        check_length(len(prompts), most)
    whole = list(prompts) if isinstance(prompts, Iterator) else values.plain(prompts)
    if not values.is_list(whole):
        advice = ""
        if isinstance(whole, bytes | bytearray | memoryview):
            advice = "; decode the bytes first"
        elif type(whole) is int:
            advice = f"; write [{whole}] for a prompt of this one token" if abs(whole) < 2**63 else ""
        elif isinstance(whole, Set | Mapping):
            advice = "; write a list, which has an order"
        elif hasattr(whole, "__fspath__"):
            advice = "; read the file first"
        raise UsageError(f"prompts is {values.shown(whole)}; it must be {_WANTED}{advice}.")
    if len(whole) and all(_is_id(one) for one in (whole[0], whole[-1])):
        check_length(len(whole), most)
        return [whole]
    return list(whole)


def _is_id(value: Any) -> bool:
    return type(values.plain(value)) in (int, bool, float)


def _request(prompt: Any, params: SamplingParams, most: int) -> GenerationRequest:
    if hasattr(prompt, "__len__") and not isinstance(prompt, str):
        check_length(len(prompt), most)
    return GenerationRequest(prompt=prompt, params=params)

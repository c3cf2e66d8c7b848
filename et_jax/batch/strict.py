"""Strict JSON parsing, and values shown in a sentence."""

import json
from collections.abc import Iterable
from typing import Any

from et_jax.io.values import excerpt

MAX_DEPTH = 64  # of nested objects and lists
MAX_DIGITS = 4300  # of an integer; Python's limit of conversion


def parse(text: str) -> Any:
    """Return the JSON value in `text`.

    Raises ValueError for invalid JSON (including NaN and Infinity), for a duplicate key in an object, and for values
    nested deeper than `MAX_DEPTH` or integers longer than `MAX_DIGITS`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(_TOO_DEEP)
    return value


def shown(value: Any) -> str:
    """Return the start of a value as JSON, to quote in a sentence."""
    return excerpt(json.dumps(value, ensure_ascii=False))


_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names: set[str] = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return values


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _integer(digits: str) -> int:
    length = len(digits.removeprefix("-"))
    if length > MAX_DIGITS:
        raise ValueError(f"it has a number of {length} digits")
    return int(digits)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [each for one in level for each in _inner(one) if isinstance(each, dict | list)]
    return bool(level)


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()

"""Conversion of callers' values: each becomes a plain one of the requested type, or a sentence that describes it.

Scalars and arrays of numpy, of JAX and similar are accepted as numbers and lists. The
sentences suit those who write JSON as well as those who write Python.
"""

import array
import dataclasses
from collections import UserString
from collections.abc import Collection, Sequence
from pathlib import PurePath
from typing import Any

from et_jax.errors import UsageError

_NUMBERS = "hHiIlLqQnNefd"  # memoryview formats of numbers, not characters or bytes
_SHOWN = 60  # the most characters of a value in a message
_FLOAT32_MAX = 3.4e38  # the device receives numbers as float32


def fill_unset(settings: Any, *, but: Collection[str] = ()) -> None:
    """Give every setting that is None its default: None means that a setting is not set.

    `settings` is a frozen dataclass under construction. Fields without a default, and those in `but`, are unchanged.
    """
    for field in dataclasses.fields(settings):
        if getattr(settings, field.name) is not None or field.name in but:
            continue
        if field.default is not dataclasses.MISSING:
            object.__setattr__(settings, field.name, field.default)
        elif field.default_factory is not dataclasses.MISSING:
            object.__setattr__(settings, field.name, field.default_factory())


def integer(name: str, value: Any, least: int | None = None, most: int | None = None, wanted: str = "") -> int:
    """Return `value` as an integer from `least` to `most`.

    Raises UsageError, naming the setting `name` and what is `wanted`, by default the bounds.
    """
    value = plain(value)
    if type(value) is not int:
        raise UsageError(f"{name} is {shown(value)}; it must be an integer.")
    if (least is not None and value < least) or (most is not None and value > most):
        too_low = most is None or (least is not None and value < least)
        bounds = f"at least {least}" if too_low else f"from {least} to {most}"
        raise UsageError(f"{name} is {shown(value)}; it must be {wanted or bounds}.")
    return value


def number(name: str, value: Any) -> float:
    """Return `value` as a finite float in the range of float32. Raises UsageError, naming the setting `name`."""
    value = plain(value)
    if type(value) not in (int, float):
        raise UsageError(f"{name} is {shown(value)}; it must be a number.")
    if not abs(value) <= _FLOAT32_MAX:
        raise UsageError(f"{name} is {shown(value)}; it must be a finite number.")
    return float(value)


def boolean(name: str, value: Any) -> bool:
    """Return `value`, which is true or false. Raises UsageError, naming the setting `name`."""
    value = plain(value)
    if type(value) is not bool:
        raise UsageError(f"{name} is {shown(value)}; it must be true or false.")
    return value


def ids(name: str, value: Sequence[Any], wanted: str) -> tuple[int, ...]:
    """Return a list of token ids as plain integers. Raises UsageError, naming the setting `name` and what is `wanted`.

    Millions of plain integers are checked quickly.
    """
    taken = tuple(value)
    if set(map(type, taken)) <= {int}:
        return taken
    taken = tuple(map(plain, taken))
    for one in taken:
        if type(one) is not int:
            raise UsageError(f"{name} holds {shown(one)}; it must be {wanted}, integers.")
    return taken


def plain(value: Any) -> Any:
    """Return the number in a scalar, the list in an array, the text in a subclass of one; else `value` itself."""
    if isinstance(value, str | UserString):
        return str.__str__(value) if isinstance(value, str) else str.__str__(value.data)
    if isinstance(value, type) or is_bytes(value):  # their `shape` and the like are not values
        return value
    try:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            return value.item()
        if getattr(value, "ndim", 0) and hasattr(value, "tolist"):
            return value.tolist()
    except TypeError:  # an array traced by JAX, without values
        return value
    return value


def is_list(value: Any) -> bool:
    """Return whether `value` is a sequence, and neither a text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str) and not is_bytes(value)


def is_bytes(value: Any) -> bool:
    """Return whether `value` has bytes or single characters: text that is not decoded, no token ids."""
    if isinstance(value, array.array):
        return value.typecode in "bBuw"
    if isinstance(value, memoryview):
        return value.format[-1:] not in _NUMBERS
    return isinstance(value, bytes | bytearray)


def broken_at(text: str) -> int | None:
    """Return the index of the first half of a surrogate pair in `text`, which is no character; None without one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def shown(value: Any) -> str:
    """Return a value for a message: briefly, on one line, whatever it is."""
    value = plain(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        return f'"{excerpt(value)}"'
    if isinstance(value, bytes):
        return f'b"{excerpt(value[: _SHOWN + 1].decode("latin-1"))}"'
    if isinstance(value, PurePath):
        return f"the path {excerpt(str(value))}"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return f"the type {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def excerpt(text: str, most: int = _SHOWN) -> str:
    """Return the start of a text, at most `most` characters of it, escaped to fit on one line."""
    cut = text if len(text) <= most else text[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)

"""JSON files and other small files of a model folder, read and validated: they may be malicious.

Every refusal is a `UsageError` that names file and field. `schema` declares the fields.
"""

import json
import os
import re
import reprlib
import stat
from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from et_jax.errors import UsageError
from et_jax.io.values import excerpt

T = TypeVar("T")

MAX_JSON_BYTES = 10 * 2**20
MAX_INDEX_BYTES = 32 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20  # of a tokenizer.json or tokenizer.model; published ones reach 35 MB
MAX_TEMPLATE_BYTES = 2**20
FETCH = "take the file from the model's repository again"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escape of half a character, or of one half of a pair
_SHOWN = 60  # the most characters of a value in a message
_REPR = reprlib.Repr(maxstring=_SHOWN, maxother=_SHOWN)


def is_there(file: Path) -> bool:
    """Return whether anything has that name, readable or not."""
    return os.path.lexists(file)


def check_regular(file: Path, most: int | None = None) -> int:
    """Return the size of a file in bytes.

    Raises UsageError unless it is a regular one of at most `most` bytes: reading a pipe would block.
    """
    try:
        found = file.stat()
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{file} is not a regular file; put the file itself in its place.")
    if most is not None and found.st_size > most:
        raise UsageError(f"{file} has {found.st_size} bytes and at most {most} are read; {FETCH}.")
    return found.st_size


def read_bytes(file: Path, most: int = MAX_JSON_BYTES) -> bytes:
    """Return the contents of a file. Raises UsageError if it is absent, larger than `most`, or not a regular file."""
    size = check_regular(file, most)
    try:
        with file.open("rb") as reader:
            return reader.read(size)  # allocated at once
    except OSError as error:
        raise _unreadable(file, error) from error


def read_text(file: Path, most: int) -> str:
    """Return the UTF-8 text of a file, see `read_bytes`."""
    try:
        return read_bytes(file, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 (byte {error.start + 1}); {FETCH}.") from error


def read_json(file: Path, most: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError for anything else, and for a duplicate field."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            [(double, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise UsageError(f"{file} holds {_shortened(double)} twice; {FETCH}.")
        return values

    def refuse(name: str) -> None:
        raise UsageError(f"{file} holds {name}, which is no number in JSON; {FETCH}.")

    try:
        text = read_bytes(file, most).decode("utf-8")
        values = json.loads(text, object_pairs_hook=once, parse_constant=refuse)
        if _SURROGATE.search(text):
            json.dumps(values, ensure_ascii=False).encode()
    except UsageError:
        raise
    except UnicodeEncodeError as error:
        raise UsageError(f"{file} is not readable JSON (half of a surrogate pair); fetch the file again.") from error
    except RecursionError as error:
        raise UsageError(f"{file} is not readable JSON (nested too deep); fetch the file again.") from error
    except ValueError as error:
        reason = str(error).split("; use sys.")[0]
        raise UsageError(f"{file} is not readable JSON ({reason}); fetch the file again.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{file} is not a JSON object; fetch the file again.")
    return values


def read_optional(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one without such a file."""
    return read_json(file) if is_there(file) else {}


def checked(values: dict[str, Any], kind: type[T], source: str | Path, remedy: str = FETCH) -> T:
    """Return `values` as the schema `kind`. Raises UsageError naming the field that is wrong."""
    try:
        return msgspec.convert(values, kind, str_keys=True)
    except UnicodeEncodeError as error:
        raise UsageError(f"{source} holds half of a surrogate pair, which is no character; {remedy}.") from error
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        absent = re.fullmatch(r"Object missing required field `(\w+)`", reason)
        path = ".".join(part for part in [*re.findall(r"\.(\w+)", place), *(absent.groups() if absent else ())])
        value = _value(values, path)
        reason = reason[0].lower() + reason[1:].replace("`", "")
        said = "missing" if value is None else f"{_shortened(value)} ({reason})"
        raise UsageError(f"{source}: the field {path} is {said}; {remedy}.") from error


def _value(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, dict) else values
    return values


def named(text: str) -> str:
    """Return a name for a message: a word unchanged, other text quoted and cut."""
    return text if text.isidentifier() and len(text) <= _SHOWN else _shortened(text)


def _shortened(value: Any) -> str:
    return excerpt(_REPR.repr(value), _SHOWN)


def _unreadable(file: Path, error: Exception) -> UsageError:
    if isinstance(error, FileNotFoundError):
        return UsageError(f"{file.parent} has no {file.name}; name a folder that holds a Hugging Face model.")
    reason = (error.strerror if isinstance(error, OSError) else None) or "the name is invalid"
    return UsageError(f"{file} cannot be read ({reason}); correct its permissions or fetch it again.")

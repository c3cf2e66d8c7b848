"""Folders with a checksum for every file: sealed when written, checked before anything in them is read."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError

FILE = "checksums.json"
_FORMAT = 2  # format 1 had no checksum file


def seal(folder: Path, **facts: Any) -> None:
    """Write the checksum of every file in `folder`, and `facts`, into a file of the folder, and sync it."""
    files = {str(file.relative_to(folder)): _digest(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    sealed = {"format": _FORMAT, "files": files} | facts
    with (folder / FILE).open("w", encoding="utf-8") as file:
        json.dump({"blake2b": _digest_of(sealed), "sealed": sealed}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check(folder: Path, remedy: str) -> dict[str, Any]:
    """Return the sealed facts of `folder`, if every file is there with unchanged bytes.

    Otherwise raises UsageError; `remedy` ends the sentence: how to obtain an intact folder.
    """
    if not (folder / FILE).exists():
        raise UsageError(
            f"{folder} has no {FILE}: an earlier et_jax wrote it without checksums, or the file is lost; {remedy}."
        )
    try:
        read = json.loads((folder / FILE).read_bytes())
        sealed = read["sealed"]
        if _digest_of(sealed) != read["blake2b"]:
            raise ValueError("its own digest differs")
        if sealed["format"] != _FORMAT:
            raise UsageError(f"{folder} is of format {sealed['format']}, not {_FORMAT}; {remedy}.")
        differing = [name for name, digest in sealed["files"].items() if _digest(folder / name) != digest]
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{folder} is damaged: files are lost or {FILE} is not as it was; {remedy}.") from error
    if differing:
        raise UsageError(f"{folder} is damaged: {differing[0]} has not the bytes it was written with; {remedy}.")
    return sealed


def _digest_of(sealed: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(sealed, sort_keys=True).encode(), digest_size=32).hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as reader:
        return hashlib.file_digest(reader, lambda: hashlib.blake2b(digest_size=32)).hexdigest()

"""Folders whose every file is known by its checksum: sealed when written, checked before anything in them is read."""

import hashlib
import json
import os
from pathlib import Path

from et_jax.types import UsageError

FILE = "checksums.json"
_FORMAT = 2  # of format 1 were folders without this file


def seal(folder: Path) -> None:
    """Write the checksum of every file in `folder` into the folder itself, and force it to the disk."""
    files = {str(file.relative_to(folder)): _digest(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    with (folder / FILE).open("w", encoding="utf-8") as file:
        json.dump({"format": _FORMAT, "blake2b": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def check(folder: Path, remedy: str) -> None:
    """Raise UsageError unless every file that was sealed in `folder` is there with the bytes it had.

    `remedy` ends the sentence: how to come by a sound folder.
    """
    seal_file = folder / FILE
    try:
        if not seal_file.exists():
            raise UsageError(
                f"{folder} has no {FILE}: an et_jax before 0.2 wrote it, which kept no checksums, or the file is lost; "
                f"{remedy}."
            )
        sealed = json.loads(seal_file.read_bytes())
        if sealed["format"] != _FORMAT:
            raise UsageError(
                f"{folder} is of format {sealed['format']!s:.20}, and this et_jax reads format {_FORMAT}; {remedy}."
            )
        differing = [name for name, digest in sealed["blake2b"].items() if _digest(folder / name) != digest]
    except UsageError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{folder} is damaged: files are lost or {FILE} is not readable; {remedy}.") from error
    if differing:
        raise UsageError(f"{folder} is damaged: {differing[0]} has not the bytes it was written with; {remedy}.")


def _digest(file: Path) -> str:
    with file.open("rb") as reader:
        return hashlib.file_digest(reader, lambda: hashlib.blake2b(digest_size=32)).hexdigest()

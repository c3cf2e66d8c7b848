"""The output file: rows are only ever appended, and what is recorded there is done.

A row is written with one call and kept in whole: where the disk refuses a part of it, that part is cut
off again. Rows are forced to the disk in groups, at most one group a second; a crash of the program loses
none that was written, a loss of power at most the last group, and those lines are done again. What a crash
tore at the end of the file is cut off when the job is opened next.

Beside the output lies its manifest, which holds the settings that the answers depend on.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from et_jax.files import replace_file
from et_jax.types import UsageError

SYNC_SECONDS = 1.0


def manifest_path(output: Path) -> Path:
    """Return where the manifest of an output file lies."""
    return output.with_name(output.name + ".manifest.json")


def check_files(source: Path, output: Path) -> None:
    """Find out before any work is done that the two files can be what they are named for. Raises UsageError."""
    if not source.exists():
        raise UsageError(f"{source} does not exist; name a file of prompts with --input.")
    if not source.is_file():
        raise UsageError(f"{source} is not a regular file; name a file of prompts with --input.")
    if output.exists() and not output.is_file():
        raise UsageError(f"{output} is not a regular file; choose another --output.")
    if output.exists() and output.samefile(source):
        raise UsageError(f"{output} is the input itself; choose another --output.")
    if output.suffix == ".parquet":
        raise UsageError(f"{output}: answers are written as JSON lines, which survive a crash; name it .jsonl.")


class Journal:
    """The rows of an output file that is open for appending.

    `recorded` has the id of every row by its key: the custom_id, or the line number where there is none.
    """

    def __init__(self, path: Path, file: int, recorded: dict[str | int, str], size: int) -> None:
        self.path, self.recorded = path, recorded
        self._file, self._size = file, size
        self._synced_at, self._synced_size = 0.0, size

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row. Raises UsageError where the disk takes no more; then the file is as it was before."""
        data = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        try:
            rest = data
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise self._refusal(error) from error
        self._size += len(data)
        key, identity = _identity(row)
        self.recorded[key] = identity
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Force what was written to the disk, if the last time is a second ago."""
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Force what was written to the disk."""
        if self._synced_size < self._size:
            try:
                os.fsync(self._file)
            except OSError as error:
                raise self._refusal(error) from error
            self._synced_size = self._size
        self._synced_at = time.monotonic()

    def _refusal(self, error: OSError) -> UsageError:
        return UsageError(
            f"{self.path} cannot be written ({error.strerror}); its {len(self.recorded)} rows are kept: "
            "make room and run the same command again."
        )


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any]) -> Iterator[Journal]:
    """Open an output file, new or begun by a job of the same `settings` (values of JSON), and mend its end.

    Raises UsageError where the file cannot be written, is no output of a job, belongs to a job of other
    settings, or is being written by another one.
    """
    _check_manifest(path, settings)
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --output.") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise UsageError(f"{path} cannot be locked ({error.strerror}); choose another --output.") from error
            raise UsageError(f"{path} is being written by another job; wait for it, or choose another.") from error
        recorded, size = _read(path)
        os.ftruncate(file, size)
        journal = Journal(path, file, recorded, size)
        try:
            yield journal
        finally:
            journal.sync()
    finally:
        os.close(file)


def _check_manifest(path: Path, settings: Mapping[str, Any]) -> None:
    """Write the manifest of a new output; compare that of one already begun."""
    beside, begun = manifest_path(path), path.exists() and path.stat().st_size > 0
    if not begun:
        replace_file(beside, json.dumps(settings, indent=2) + "\n")
        return
    if not beside.exists():
        raise UsageError(f"{path} has no {beside.name} beside it, so no job began it; choose another --output.")
    try:
        before = json.loads(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{beside} is damaged; choose another --output.") from error
    now = json.loads(json.dumps(settings))
    differing = [name for name in now | before if now.get(name) != before.get(name)]
    if differing:
        changes = "; ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in differing)
        raise UsageError(
            f"{path} was begun under other settings ({changes}); repeat the command it was begun with, "
            "or choose another --output."
        )


def _read(path: Path) -> tuple[dict[str | int, str], int]:
    """Return the rows recorded in an output file, and the size up to which it is whole."""
    recorded: dict[str | int, str] = {}
    size, torn_line = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                key, identity = _identity(json.loads(line))
                whole = line.endswith(b"\n")
            except (ValueError, KeyError, TypeError, RecursionError):
                whole = False
            if not whole:
                torn_line = torn_line or number
            elif torn_line:
                raise UsageError(f"{path}: line {torn_line} is no row of a job; choose another --output.")
            else:
                recorded[key] = identity
                size += len(line)
    return recorded, size


def _identity(row: Mapping[str, Any]) -> tuple[str | int, str]:
    """Return what a row is found by, and its id. Raises KeyError or TypeError for what is no row."""
    name, identity = row["custom_id"], row["id"]
    if name is None:
        name = row["error"]["line"]
    if not isinstance(name, str | int) or not isinstance(identity, str):
        raise TypeError("a row has a custom_id, or an error with a line, and an id")
    return name, identity

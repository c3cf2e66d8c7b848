"""The output file: an append-only journal; a line with a row in it is done.

A row is written with a single call. If the disk accepts only a part of it, the file is truncated to its size before.
Rows are synced to the disk in groups, at most one group per second. A crash of the program loses no written row; a
power loss loses at most the last group, whose lines are completed again. A crash may leave a torn last line, which is
truncated when the journal is opened next; nothing else is ever removed.

With every row and every second the journal checks that the file is still in place and has the size that this job gave
it. If the file was removed, its rows are copied elsewhere, see `rescue`.
"""

import contextlib
import errno
import fcntl
import json
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from et_jax.batch import rescue
from et_jax.batch.manifest import Manifest, manifest_path
from et_jax.batch.source import check_source
from et_jax.errors import UsageError

SYNC_SECONDS = 1.0
_OPENING = b'{"id": "batch_req_'  # the first bytes of every row


def check_files(source: Path, output: Path) -> None:
    """Raise UsageError, before any work, if the input or output file cannot be used as such."""
    check_source(source)
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"{output} is not a regular file; choose another --output.")
    if os.path.exists(output) and output.samefile(source):
        raise UsageError(f"{output} is the input itself; choose another --output.")
    if output.suffix == ".parquet":
        raise UsageError(f"{output}: a job on Ray writes JSON lines alone, which survive a crash; name it .jsonl.")


class Journal:
    """The rows of an output file that is open for appending.

    `recorded` has the id of every row by its key: the custom_id, or the line number if there is none.
    """

    def __init__(self, path: Path, file: int, manifest: Manifest, recorded: dict[str | int, str], size: int) -> None:
        self.path, self.recorded = path, recorded
        self._file, self._manifest, self._size = file, manifest, size
        self._synced_at, self._synced_size = 0.0, size
        self._sound = True  # no loss was reported

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row.

        Raises UsageError if the disk is full, and restores the file's previous size, or if another program changed the
        file.
        """
        data = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        key, identity = _identity(row)
        self._check(data, key, identity)
        try:
            self._write(data)
        except OSError as error:
            try:
                os.ftruncate(self._file, self._size)
            except OSError:  # the torn row is truncated when the journal is opened next
                self._sound = False
            raise self._refusal(error) from error
        self._size += len(data)
        self.recorded[key] = identity
        self.sync_if_due()

    def sync_if_due(self) -> None:
        """Sync the rows to the disk, if the last sync is at least a second ago."""
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Sync the rows to the disk, and check that the file and the manifest are in place."""
        self._check()
        if self._synced_size < self._size:
            try:
                os.fsync(self._file)
            except OSError as error:
                raise self._refusal(error) from error
            self._synced_size = self._size
        if said := self._manifest.restore():
            print(f"warning: {said}", file=sys.stderr)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        """Sync for the last time, unless a loss was reported already."""
        if self._sound:
            self.sync()

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]

    def _check(self, data: bytes = b"", *row: Any) -> None:
        """Raise UsageError unless the file is in place and unchanged; `data` of a `row` is to be written next."""
        opened = os.fstat(self._file)
        there = _state(self.path)
        in_place, intact = there is not None and os.path.samestat(opened, there), opened.st_size == self._size
        if in_place and intact:
            return
        self._sound = False
        if in_place:
            raise UsageError(
                f"{self.path} was changed by another program while the job ran (it has {opened.st_size} bytes, not "
                f"{self._size}), and nothing more is written; run the same command again, which says what it lacks."
            )
        if data and intact:
            with contextlib.suppress(OSError):  # a torn row is truncated later
                self._write(data)
                self.recorded[row[0]] = row[1]
        rows = f"its {len(self.recorded)} rows" if intact else "what is left of its rows"
        raise UsageError(f"{self.path} was {self._fate(there is not None, rows)}")

    def _fate(self, replaced: bool, rows: str) -> str:
        """Rescue the rows of a file that was moved or removed, and return the rest of a sentence about it."""
        if place := rescue.found(self._file):
            return f"moved to {place} while the job ran; move it back and run the same command again."
        fate = f"{'replaced by another file' if replaced else 'removed'} while the job ran;"
        try:
            place = rescue.copy(self._file, self.path)
        except OSError as error:
            return f"{fate} {rows} could not be kept ({error.strerror or error}): run the same command again."
        beside = "put that"
        try:
            self._manifest.restore()
        except UsageError:  # its folder is gone
            with contextlib.suppress(UsageError):  # the place of the rows must be reported in any case
                beside = f"put that and {self._manifest.copy(place)}"
        return f"{fate} {rows} are kept in {place}: {beside} in its place and run the same command again."

    def _refusal(self, error: OSError) -> UsageError:
        return UsageError(
            f"{self.path} cannot be written ({error.strerror}); its {len(self.recorded)} rows are kept: "
            "make room and run the same command again."
        )


@contextmanager
def open_journal(path: Path, settings: Mapping[str, Any]) -> Iterator[Journal]:
    """Open an output file, new or begun by a job of the same `settings` (values of JSON), and truncate a torn end.

    Nothing is written before the file is locked. Raises UsageError if it cannot be written, is not a job's output,
    belongs to a job of other settings, or another job is writing it.
    """
    with _locked(path) as file:
        manifest = Manifest(path, settings)
        if os.fstat(file).st_size == 0:
            manifest.begin()
            recorded, size = {}, 0
        else:
            manifest.compare()
            recorded, size = _read(path)
            os.ftruncate(file, size)
        journal = Journal(path, file, manifest, recorded, size)
        try:
            yield journal
        finally:
            journal.close()


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open and lock a file; if the job fails to start, remove the file and manifest that it created, if empty."""
    is_new, beside = not os.path.lexists(path), manifest_path(path)
    has_manifest = os.path.lexists(beside)
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another --output.") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise UsageError(f"{path} cannot be locked ({error.strerror}); choose another --output.") from error
            raise UsageError(f"{path} is being written by another job; wait for it, or choose another.") from error
        opened, there = os.fstat(file), _state(path)
        if there is None or not os.path.samestat(opened, there):
            raise UsageError(f"{path} was replaced by another file just now; run the same command again.")
        if not stat.S_ISREG(opened.st_mode):
            raise UsageError(f"{path} is not a regular file; choose another --output.")
        try:
            yield file
        except UsageError:
            opened, there = os.fstat(file), _state(path)
            if is_new and opened.st_size == 0 and there is not None and os.path.samestat(opened, there):
                os.unlink(path)
                if not has_manifest and os.path.lexists(beside):
                    beside.unlink()
            raise
    finally:
        os.close(file)


def _state(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _read(path: Path) -> tuple[dict[str | int, str], int]:
    """Return the rows recorded in an output file, and its size without a torn last line.

    Raises UsageError naming a line that is not a row, unless it is a torn last line.
    """
    recorded: dict[str | int, str] = {}
    size, torn = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                key, identity = _identity(json.loads(line.decode()))
                complete = line.endswith(b"\n")
            except (ValueError, KeyError, TypeError, RecursionError):
                complete = False
            if torn or not (complete or _is_torn(line)):
                raise UsageError(
                    f"{path}: line {torn or number} is no row of a job, and nothing was changed; "
                    "take it out of the file, or choose another --output."
                )
            if not complete:
                torn = number
            elif key in recorded:
                name = f"custom_id {json.dumps(key)}" if isinstance(key, str) else f"input line {key}"
                raise UsageError(f"{path}: line {number} is a second row of {name}; remove one of them and run again.")
            else:
                recorded[key] = identity
                size += len(line)
    return recorded, size


def _is_torn(line: bytes) -> bool:
    """Return whether a last line may be a row torn by a crash: its beginning, or zero bytes never written."""
    begins = line[:1] == b"\0" or line.startswith(_OPENING) or _OPENING.startswith(line.rstrip(b"\0"))
    return begins and (not line.endswith(b"\n") or b"\0" in line)


def _identity(row: Any) -> tuple[str | int, str]:
    """Return the key of a row, and its id. Raises KeyError or TypeError for a value that is not a row."""
    name, identity = row["custom_id"], row["id"]
    if name is None:
        name = row["error"]["line"]
        named = type(name) is int
    else:
        named = isinstance(name, str)
    if not named or not isinstance(identity, str):
        raise TypeError("a row has a custom_id, or an error with a line, and an id")
    return name, identity

"""Files that are whole or not there: written beside their place, then moved into it."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from et_jax.errors import UsageError


def expanded(path: str | Path) -> Path:
    """Return a path with the home that it begins with in full, if it does.

    Raises UsageError where that home is no place: unknown, or not absolute.
    """
    home = os.environ.get("HOME", "/")
    if Path(path).parts[:1] == ("~",) and not os.path.isabs(home):
        raise UsageError(f"{path} begins with a home, and HOME is {home!r}; set it, or name the path in full.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path} begins with a home that is not known; set HOME, or name the path in full.") from error


def replace_file(path: Path, text: str) -> None:
    """Put `text` at `path`: a reader sees the old file or the new, never half of either.

    The text is on the disk before its name is. A link stays, and what it points to is replaced. Raises
    UsageError where it cannot be written.
    """
    with _beside(path) as (file, beside, place):
        with os.fdopen(file, "w", encoding="utf-8") as writer:
            writer.write(text)
            writer.flush()
            os.fsync(file)
        os.replace(beside, place)
        _sync_folder(place.parent)


def check_replaceable(path: Path) -> None:
    """Find out whether `replace_file` can write there, and leave what is there as it is. Raises UsageError."""
    with _beside(path) as (file, beside, _):
        os.close(file)
        beside.unlink()


@contextmanager
def _beside(path: Path) -> Iterator[tuple[int, Path, Path]]:
    """Open a new file in the folder of `path` under a name that is free; it goes where the block fails."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is not a regular file; choose another file.")
    place = Path(os.path.realpath(path))
    beside = place.with_name(f".{secrets.token_hex(8)}.new")
    try:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        yield file, beside, place
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file.") from error


def _sync_folder(folder: Path) -> None:
    """Force a new name in a folder to the disk, where the system can."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

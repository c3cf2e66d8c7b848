"""Atomic writes of files: written beside their place, then moved into it."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from et_jax.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def expanded(path: str | Path) -> Path:
    """Return a path with a leading ~ replaced by the home folder.

    Raises UsageError if the home is unknown, or not absolute.
    """
    home = os.environ.get("HOME", "/")
    if Path(path).parts[:1] == ("~",) and not os.path.isabs(home):
        raise UsageError(f"{path} begins with a home, and HOME is {home!r}; set it, or name the path in full.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{path} begins with a home that is not known; set HOME, or name the path in full.") from error


def cache_folder() -> Path:
    """Return the user's folder for files that et_jax can recreate: under XDG_CACHE_HOME, an absolute path, or ~/.cache.

    Raises UsageError if there is no home.
    """
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else expanded("~/.cache")) / "et_jax"


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Put `content` at `path` atomically: a reader sees the old file or the new one.

    The content is synced before the file is renamed. A link stays, and its target is replaced; permissions stay. Raises
    UsageError if it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with _beside(path) as (writer, beside, place):
        writer.write(data)
        writer.flush()
        os.fsync(writer.fileno())
        os.replace(beside, place)
        _sync_folder(place.parent)


def replace_picture(path: str | Path, figure: "Figure", **how: Any) -> None:
    """Put a drawing at `path` like `replace_file`; the format follows the suffix, `how` is for `savefig`."""
    drawn = BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:] or None, **how)
    replace_file(path, drawn.getvalue())


def check_writable(path: str | Path, *, grows: bool = False) -> None:
    """Check that a file can be written at `path`, and leave it unchanged.

    It will be replaced atomically or, if it `grows`, appended to, which devices and pipes support too. Raises
    UsageError.
    """
    found = _found(path)
    if grows and found is not None and not stat.S_ISDIR(found.st_mode):
        if not os.access(path, os.W_OK):
            raise _refusal(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        return
    with _beside(path):
        pass


@contextmanager
def _beside(path: str | Path) -> Iterator[tuple[Any, Path, Path]]:
    """Open a new file in the folder of `path` under an unused name; it is deleted unless the block renames it."""
    found = _found(path)
    if str(path).endswith(os.sep):
        raise UsageError(f"{path} is the name of a folder; choose another file.")
    if found is not None and not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
        raise UsageError(f"{path} is {kind}; choose another file.")
    place = Path(os.path.realpath(path))
    beside = place.with_name(f".{secrets.token_hex(8)}.new")
    try:
        if found is not None and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with os.fdopen(file, "wb") as writer:
                if found is not None:
                    os.fchmod(file, stat.S_IMODE(found.st_mode))
                yield writer, beside, place
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
    except OSError as error:
        raise _refusal(path, error) from error


def _found(path: str | Path) -> os.stat_result | None:
    """Return the status of `path`, None if nothing is there. Raises UsageError for an invalid file name."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _refusal(path, error) from error


def _refusal(path: str | Path, error: OSError | ValueError) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else error
    return UsageError(f"{path} cannot be written ({reason}); choose another file.")


def _sync_folder(folder: Path) -> None:
    """Sync a new name in a folder to the disk, if the system can."""
    with contextlib.suppress(OSError):
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

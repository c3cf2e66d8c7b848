"""Rescues the rows of a file that was moved or removed while open: finds it, or copies it under a new name.

A removed file exists as long as it is open, so it can still be read in full.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from et_jax.batch.manifest import manifest_path

_PIECE_BYTES = 2**20


def found(file: int) -> Path | None:
    """Return the current path of an open file, or None if it was removed or the system does not report it."""
    with contextlib.suppress(OSError):
        place = Path(os.readlink(f"/proc/self/fd/{file}"))
        if os.path.samestat(os.stat(place), os.fstat(file)):
            return place
    return None


def copy(file: int, path: Path) -> Path:
    """Copy an open file, which was removed from `path`, to a new file beside it, and return the new path.

    The copy goes to the folder of `path` or, if that is not writable, to the working directory, or else to the folder
    for temporary files. Raises OSError if none is writable.
    """
    refusal = OSError("no folder is left")
    for folder in (path.parent, Path.cwd(), Path(tempfile.gettempdir())):
        try:
            return _copy(file, folder.absolute() / f"{path.name}.rescued")
        except OSError as error:
            refusal = error
    raise refusal


def _copy(file: int, first: Path) -> Path:
    number, place = 1, first
    while os.path.lexists(place) or os.path.lexists(manifest_path(place)):
        number += 1
        place = first.with_name(f"{first.name}.{number}")
    copied = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        offset = 0
        while piece := os.pread(file, _PIECE_BYTES, offset):
            offset += os.write(copied, piece)
        os.fsync(copied)
    except OSError:
        os.unlink(place)
        raise
    finally:
        os.close(copied)
    return place

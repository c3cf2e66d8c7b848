"""Files that are whole or not there: written beside their place, then moved into it."""

import contextlib
import os
from pathlib import Path

from et_jax.types import UsageError


def replace_file(path: Path, text: str) -> None:
    """Put `text` at `path`: whoever reads sees the old file or the new, never half of either.

    The text is on the disk before its name is. Raises UsageError where it cannot be written.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; choose another file.")
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file.") from error

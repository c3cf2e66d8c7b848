"""Text files that a user names."""

import io
import itertools
from pathlib import Path

from et_jax.errors import UsageError

TEXT_BYTES = 256 * 2**20  # the greatest size that is read
_PIECE = 2**20


def read_text(path: Path, called: str) -> str:
    """Return the text of a file, named `called` in errors, with normalised line ends.

    Raises UsageError if it is not UTF-8, is empty, or has more than TEXT_BYTES.
    """
    try:
        with path.open("rb") as file:
            data = b"".join(itertools.islice(iter(lambda: file.read(_PIECE), b""), TEXT_BYTES // _PIECE + 1))
        if len(data) > TEXT_BYTES:
            raise UsageError(f"{called} {path} holds more than {TEXT_BYTES >> 20} MiB; name a shorter text.")
        text = decoded(data)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{called} {path} cannot be read ({why}); name a text file.") from error
    if not text.strip():
        raise UsageError(f"{called} {path} is empty; name a text file.")
    return text


def decoded(data: bytes) -> str:
    """Return the text of a file, with normalised line ends. Raises UnicodeDecodeError if it is not UTF-8."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()

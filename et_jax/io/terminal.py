"""The abilities of a terminal: whether it supports escape sequences, and the width of a line."""

import os
from typing import Protocol, runtime_checkable

_COLUMNS = 80  # of a terminal that does not report its width


@runtime_checkable
class Stream(Protocol):
    """A stream that may be a terminal."""

    def isatty(self) -> bool: ...

    def fileno(self) -> int: ...


def takes_escapes(stream: Stream | None) -> bool:
    """Return whether lines may be rewritten, coloured and cleared on `stream`.

    Requires a terminal whose TERM is neither dumb nor unset, without the
    NO_COLOR setting (https://no-color.org).
    """
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("TERM", "dumb") != "dumb"


def fitted(text: str, terminal: Stream) -> str:
    """Return as much of a text as fits into one row of a terminal, the only part that can be rewritten."""
    from rich.cells import cell_len

    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    room = (columns or _COLUMNS) - 1  # some terminals wrap after writing the last column
    while cell_len(text) > room:
        text = text[:-1]
    return text

"""What a terminal can show: whether it understands escape sequences, and how much fits into a line of it."""

import os
from typing import Protocol, runtime_checkable

_COLUMNS = 80  # of a terminal that does not say


@runtime_checkable
class Stream(Protocol):
    """What can be asked whether it is a terminal, and which."""

    def isatty(self) -> bool: ...

    def fileno(self) -> int: ...


def takes_escapes(stream: Stream | None) -> bool:
    """Return whether lines may be rewritten, coloured and cleared on `stream`.

    Only a terminal can, whose TERM is neither dumb nor unset, and whose owner has not asked for plain text
    with NO_COLOR (https://no-color.org).
    """
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("TERM", "dumb") != "dumb"


def fitted(text: str, terminal: Stream) -> str:
    """Return as much of a text as fits into one row of a terminal, which alone can be rewritten."""
    from rich.cells import cell_len

    try:
        columns = os.get_terminal_size(terminal.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    room = (columns or _COLUMNS) - 1  # some go on in the next row once the last column is written
    while cell_len(text) > room:
        text = text[:-1]
    return text

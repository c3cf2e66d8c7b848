"""Whether a stream is a terminal that understands escape sequences."""

import os
from typing import Protocol, runtime_checkable


@runtime_checkable
class Stream(Protocol):
    """What can be asked whether it is a terminal."""

    def isatty(self) -> bool: ...


def takes_escapes(stream: Stream | None) -> bool:
    """Return whether lines may be rewritten, coloured and cleared on `stream`.

    Only a terminal can, whose TERM is neither dumb nor unset, and whose owner has not asked for plain text
    with NO_COLOR (https://no-color.org).
    """
    if stream is None or not stream.isatty() or os.environ.get("NO_COLOR"):
        return False
    return os.environ.get("TERM", "dumb") != "dumb"

"""A place in the output of a notebook cell that is rewritten in place. Only this module imports IPython."""

import sys
import time
from collections.abc import Callable

_EVERY = 0.1  # seconds between two drawings: faster is invisible, and a remote front end must receive each


def in_notebook() -> bool:
    """Return whether a kernel with an HTML front end runs this: a notebook's, not a terminal's."""
    ipython = sys.modules.get("IPython")  # every kernel loads it before the first cell
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Area:
    """A place in the output of the cell that draws first, rewritten in place."""

    def __init__(self) -> None:
        self._handle, self._next = None, 0.0

    def draw(self, drawn: Callable[[], tuple[str, str]], *, last: bool = False) -> None:
        """Show what `drawn` returns, HTML and plain text; unless it is the `last`, it is skipped soon after another."""
        if not last and time.monotonic() < self._next:
            return
        html, text = drawn()
        shown = {"text/html": html, "text/plain": text}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
        self._next = time.monotonic() + _EVERY

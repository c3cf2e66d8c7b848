"""A place in the output of a notebook cell that is rewritten in place. IPython is imported here alone."""

import sys
import time
from collections.abc import Callable

_EVERY = 0.1  # seconds between two drawings: an eye sees no more, and a far front end must get each


def in_notebook() -> bool:
    """Return whether a kernel runs this, whose front end draws HTML: a notebook's, not a terminal's."""
    ipython = sys.modules.get("IPython")  # loaded by every kernel before the first cell
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Area:
    """A place in the output of the cell that draws first, rewritten in place."""

    def __init__(self) -> None:
        self._handle, self._next = None, 0.0

    def draw(self, drawn: Callable[[], tuple[str, str]], *, last: bool = False) -> None:
        """Show what `drawn` returns, HTML and the same as text; not too soon after another unless it is the `last`."""
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

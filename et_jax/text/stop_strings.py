"""Stop strings in a stream of text: what may be shown, and where the text ends."""

from collections.abc import Sequence


class StopStrings:
    """Searches streamed text for the first complete one of several strings.

    The pieces from `push` and `flush` concatenate to the text before that string, or to all of it, however the
    text was cut. Of two that end together the longer counts. `found` is the string that ended the text.
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise ValueError("stops holds an empty string, which would end every text; leave it out.")
        self._stops = tuple(stops)
        self._pending = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that is now certain to precede any stop string."""
        if self.found is not None:
            return ""
        text = self._pending + piece
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._pending = ""
            return text[:at]
        at = self._begun(text)
        self._pending = text[at:]
        return text[:at]

    def flush(self) -> str:
        """Return the text that is still held back, at its end without a stop string."""
        text, self._pending = self._pending, ""
        return text

    def _begun(self, text: str) -> int:
        """Return where the earliest unfinished stop string begins at the end of `text`; its length without one."""
        longest = max(map(len, self._stops), default=0)
        ends = range(max(len(text) - longest + 1, 0), len(text))
        return next((at for at in ends if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))

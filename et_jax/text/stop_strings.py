"""Stop strings in a stream of text: what may be shown, and where the text ends."""

from collections.abc import Sequence


class StopStrings:
    """Watches a text that comes in pieces for the first of several strings to be complete.

    The pieces from `push` and `flush` add up to the text before that string, or to all of it, however the
    text was cut. Of two that end together the longer counts. `found` is the string that ended the text.
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise ValueError("stops holds an empty string, which would end every text; leave it out.")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that is now certain to come before any stop string."""
        if self.found is not None:
            return ""
        text = self._held + piece
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.found = min(matches)
            self._held = ""
            return text[:at]
        at = self._begun(text)
        self._held = text[at:]
        return text[:at]

    def flush(self) -> str:
        """Return what is still held back. The text ends here, without a stop string."""
        text, self._held = self._held, ""
        return text

    def _begun(self, text: str) -> int:
        """Return where the earliest unfinished stop string begins at the end of `text`; its length if none does."""
        longest = max(map(len, self._stops), default=0)
        ends = range(max(len(text) - longest + 1, 0), len(text))
        return next((at for at in ends if any(stop.startswith(text[at:]) for stop in self._stops)), len(text))

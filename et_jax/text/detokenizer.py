"""Streaming detokenisation."""

from et_jax.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Text of a stream of ids. The pieces from `push` and `flush` concatenate to `decode` of all ids.

    Text is held back while it may still change: an unfinished character (shown as U+FFFD), a run of byte
    pieces. Only the last settled id and those after it are decoded again.
    """

    UNFINISHED = 3  # bytes of a character that lacks its last one, each of which may be shown as its own U+FFFD
    OVERLAP, LONGEST = 12, 24  # ids decoded again while U+FFFD follows U+FFFD: up to three, of up to three bytes

    def __init__(self, tokenizer: Tokenizer):
        self._backend = tokenizer.backend
        self._window: list[int] = []
        self._shown = 0

    def push(self, id: int) -> str:
        """Return the text that became final with `id`, which may be empty."""
        if not self._backend.visible(id):
            return ""
        self._window.append(id)
        if not self._backend.settled(id):
            return ""
        text = self._backend.decode(self._window)
        pending = min(len(text) - len(text.rstrip(REPLACEMENT)), self.UNFINISHED)
        piece = text[self._shown : len(text) - pending]
        self._shown = max(self._shown, len(text) - pending)
        if not pending or len(self._window) > self.LONGEST:
            self._window = self._window[-self.OVERLAP :] if pending else [id]
            self._shown = len(self._backend.decode(self._window)) - pending
        return piece

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream."""
        text = self._backend.decode(self._window)
        piece, self._shown = text[self._shown :], len(text)
        return piece

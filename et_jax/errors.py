"""Mistakes that their maker can mend."""


class UsageError(ValueError):
    """A mistake its maker can mend. The message is one sentence that says how; no traceback is shown.

    Characters that would move a terminal's cursor or begin another line are escaped, whatever the sentence quotes.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence))

"""Mistakes that their maker can mend."""


class UsageError(ValueError):
    """A mistake its maker can mend. The message is one sentence that says how; no traceback is shown.

    Characters that would move a terminal's cursor or begin another line are escaped, whatever the sentence quotes.
    `on_command_line` is the same sentence for those who write flags, where it names settings.
    """

    def __init__(self, sentence: str, *, on_command_line: str | None = None) -> None:
        super().__init__(_escaped(sentence))
        self.on_command_line = _escaped(sentence if on_command_line is None else on_command_line)


def _escaped(sentence: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)

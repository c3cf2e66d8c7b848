"""Messages in which special tokens stay plain text, whatever the chat template adds."""

import functools
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from et_jax.text.backends import Backend

_DIGITS = 30  # of an unguessable name, which depends on all messages
_INDEX = 6


class Masked:
    """Messages whose special tokens are replaced by names of digits, which templates pass on unchanged.

    `texts` are the replaced ones: a name ends with an index into them. No name occurs in the messages
    themselves. Equal messages have equal names.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], special_texts: Collection[str]) -> None:
        self._special = _any_of(frozenset(special_texts))
        self._name = hashlib.sha256(repr(messages).encode(errors="replace")).hexdigest()
        self._name = f"{int(self._name, 16) % 10**_DIGITS:0{_DIGITS}}"
        self._indices: dict[str, int] = {}
        self.messages = self._masked(list(messages))
        self.texts = list(self._indices)

    def _masked(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._special.sub(self._replacement, value)
        if isinstance(value, Mapping):
            return {name: self._masked(entry) for name, entry in value.items()}
        return [self._masked(entry) for entry in value] if isinstance(value, list | tuple) else value

    def _replacement(self, match: re.Match[str]) -> str:
        return f"{self._name}{self._indices.setdefault(match[0], len(self._indices)):0{_INDEX}}"

    def parts(self, rendered: str) -> list[tuple[str, bool]]:
        """Return the rendered text in parts, and of each whether it is one of the replaced texts."""
        pieces = re.split(rf"{self._name}(\d{{{_INDEX}}})", rendered)
        return [(self.texts[int(piece)] if index % 2 else piece, bool(index % 2)) for index, piece in enumerate(pieces)]


@functools.lru_cache(maxsize=8)
def _any_of(texts: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if text) or r"(?!)")


def encode_parts(parts: Sequence[tuple[str, bool]], backend: Backend) -> list[int]:
    """Return the ids of consecutive parts, with the special tokens of replaced ones read as text."""
    stretches: list[str | int] = [""]
    for text, replaced in parts:
        for piece in [text] if replaced else backend.split(text):
            if isinstance(piece, str) and isinstance(stretches[-1], str):
                stretches[-1] += piece
            else:
                stretches.append(piece)
    ids: list[int] = []
    for index, stretch in enumerate(stretches):
        if isinstance(stretch, int):
            ids.append(stretch)
        elif stretch:
            ids.extend(backend.encode_plain(stretch, opens=index == 0))
    return ids

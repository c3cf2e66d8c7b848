"""The rows of the output of a batch: the fields that a report reads."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from et_jax.errors import UsageError


class Message(msgspec.Struct):
    """The message of a choice of a chat."""

    content: str


class Choice(msgspec.Struct):
    """One continuation, as text or as a message."""

    text: str | None = None
    message: Message | None = None

    @property
    def full_text(self) -> str:
        """The text of the choice, or of its message."""
        return (self.text or "") if self.message is None else self.message.content


class Usage(msgspec.Struct):
    """The tokens of an answer."""

    completion_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**53)]


Sum = Annotated[float, msgspec.Meta(ge=-1e60, le=1e60)]
"""A figure of a run, or a sum of such; its sums and squares stay finite."""


class Entropic(msgspec.Struct):
    """The fields of `Totals.to_dict` that a report reads; None is unknown."""

    entropic_time: Sum | None
    cost_bytes: Sum | None
    nats_per_byte: Sum | None
    mean_entropy: Sum | None = None
    share_read: Sum | None = None


class Body(msgspec.Struct):
    """The fields of an answer that a report reads."""

    choices: list[Choice]
    usage: Usage
    entropic: Entropic


class Response(msgspec.Struct):
    """An answer as OpenAI's batch format wraps it."""

    body: Body


class Row(msgspec.Struct):
    """A row of the output of a batch; `response` is None in an error row."""

    id: str
    custom_id: str | None
    response: Response | None


def is_batch(path: Path) -> bool:
    """Return whether the first line of a file looks like a row of a batch."""
    with contextlib.suppress(OSError, ValueError, RecursionError), path.open("rb") as file:
        first = json.loads(file.readline())
        return isinstance(first, dict) and {"custom_id", "response"} <= first.keys()
    return False


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of the output of a batch, except a torn last one.

    Raises UsageError naming an invalid line.
    """
    decoder = msgspec.json.Decoder(Row)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    if not line.endswith(b"\n"):
                        return
                    raise UsageError(
                        f"{path}: line {number} is no row of a batch ({error}); name the --output of a batch, "
                        "or a file that --trace wrote."
                    ) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name the --output of a batch.") from error

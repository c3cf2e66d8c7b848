"""A run of one prompt as a file of JSON lines, and its reader, which returns the original completions.

The first line is a header, `{"trace": VERSION}` with the fields of `About`. A line per token follows, in the order of
sampling, `index` with the fields of `TokenTrace`, and at the end of every continuation `{"index": ..., "end": {...}}`
with the fields of `End`.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from et_jax.cli.streams import Stream
from et_jax.errors import UsageError
from et_jax.io.json_files import checked
from et_jax.serve.completions import Completion, FinishReason, PromptRead, TokenEvent, TokenTrace, Unreturned
from et_jax.serve.requests import MAX_N

VERSION = 1
_MOST_BYTES = 2**27  # of a line: the longest prompt of the command line with its escapes
_AGAIN = "write it again with --trace"


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """The subject of a trace: `n` continuations of a prompt of `prompt_tokens` tokens, by a model under a control.

    `min_context` is that of its completions.
    """

    model: str
    control: str
    n: Annotated[int, Meta(ge=1, le=MAX_N)]
    prompt: str
    prompt_tokens: Annotated[int, Meta(ge=0)]
    min_context: Annotated[int, Meta(ge=0)] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """The end of a continuation, as in `Completion`; `text` was held back until then and belongs to its last token."""

    finish_reason: FinishReason
    error: str | None
    prompt_read: PromptRead | None
    tokens_left_out: Annotated[int, Meta(ge=0)]
    text: str
    unreturned: Unreturned | None = None


class TraceWriter:
    """Writes the trace of a run during the run; if that fails, the run continues and `check` raises the error."""

    def __init__(self, stream: Stream, about: About) -> None:
        self._stream = stream
        self._fault: OSError | None = None
        self._written = [0] * about.n
        self._write({"trace": VERSION} | dataclasses.asdict(about))

    def take(self, event: TokenEvent) -> None:
        """Write one token, or the end of a continuation."""
        if event.trace is not None:
            self._row(event.index, event.trace)
        if (done := event.completion) is None:
            return
        for row in done.trace[self._written[event.index] :]:  # tokens that an error left without an event
            self._row(event.index, row)
        end = End(
            finish_reason=done.finish_reason,
            error=done.error,
            prompt_read=done.prompt_read,
            tokens_left_out=done.tokens_left_out,
            text=event.text if event.trace is None else "",
            unreturned=done.unreturned,
        )
        self._write({"index": event.index, "end": dataclasses.asdict(end)})

    def check(self) -> None:
        """Raise the OSError that ended the trace, if there was one."""
        if self._fault is not None:
            raise self._fault

    def _row(self, index: int, row: TokenTrace) -> None:
        self._written[index] += 1
        self._write({"index": index} | dataclasses.asdict(row))

    def _write(self, values: dict[str, Any]) -> None:
        if self._fault is not None:
            return
        try:
            self._stream.write(json.dumps(values, ensure_ascii=False) + "\n")
            self._stream.flush()
        except OSError as error:
            self._fault = error


def read_trace(path: Path) -> tuple[About, list[Completion]]:
    """Return a trace's header and its `n` completions, equal to the original ones; one without an end is an "abort".

    A torn last line is ignored. Raises UsageError, one sentence, for a file that is not a trace of this
    version or is damaged.
    """
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{path} is empty or has no complete line; {_AGAIN}.")
    about = _about(path, first[1])
    rows: list[list[TokenTrace]] = [[] for _ in range(about.n)]
    ends: list[End | None] = [None] * about.n
    for number, values in lines:
        source, index = f"{path}, line {number}", values.get("index")
        if type(index) is not int or not 0 <= index < about.n:
            raise UsageError(f"{source}: the field index is no number below n = {about.n}; {_AGAIN}.")
        if ends[index] is not None:
            raise UsageError(f"{source} comes after the end of continuation {index}; {_AGAIN}.")
        if "end" not in values:
            rows[index].append(checked(values, TokenTrace, source, _AGAIN))
        elif isinstance(end := values["end"], dict):
            ends[index] = checked(end, End, source, _AGAIN)
        else:
            raise UsageError(f"{source}: the field end is no JSON object; {_AGAIN}.")
    pairs = zip(rows, ends, strict=True)
    return about, [_completion(about, index, own, end) for index, (own, end) in enumerate(pairs)]


def _about(path: Path, header: dict[str, Any]) -> About:
    version = header.get("trace")
    if version is None:
        raise UsageError(f"{path} has no header, as traces of an older et_jax have none; {_AGAIN}.")
    if type(version) is not int:
        raise UsageError(f"{path}, line 1: the field trace is no version; {_AGAIN}.")
    if version != VERSION:
        raise UsageError(f"{path} is a trace of version {version}; this et_jax reads version {VERSION}: {_AGAIN}.")
    return checked(header, About, f"{path}, line 1", _AGAIN)


def _completion(about: About, index: int, rows: list[TokenTrace], end: End | None) -> Completion:
    if end is not None and rows:
        rows[-1] = dataclasses.replace(rows[-1], text=rows[-1].text + end.text)
    return Completion(
        prompt=about.prompt,
        prompt_tokens=about.prompt_tokens,
        index=index,
        text="".join(row.text for row in rows),
        token_ids=tuple(row.token for row in rows),
        finish_reason="abort" if end is None else end.finish_reason,
        trace=tuple(rows),
        error=None if end is None else end.error,
        prompt_read=None if end is None else end.prompt_read,
        tokens_left_out=0 if end is None else end.tokens_left_out,
        min_context=about.min_context,
        unreturned=None if end is None else end.unreturned,
    )


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield every line by its number; a torn last one, without a newline and invalid JSON, is ignored."""
    try:
        if not path.exists():
            raise UsageError(f"{path} is not there; name a file that --trace has written.")
        if not path.is_file():
            raise UsageError(f"{path} is not a regular file; name one that --trace has written.")
        with path.open("rb") as file:
            number = 0
            while line := file.readline(_MOST_BYTES):
                number += 1
                if (values := _values(f"{path}, line {number}", line)) is not None:
                    yield number, values
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}); name a file that --trace has written.") from error


def _values(source: str, line: bytes) -> dict[str, Any] | None:
    """Return the object on a line; None for a torn line. Raises UsageError for anything else."""

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise UsageError(f"{source} contains {text}, which is no finite number; {_AGAIN}.")
        return number

    try:
        values = json.loads(line.decode("utf-8"), parse_float=finite, parse_constant=finite)
        if b"\\u" in line:
            json.dumps(values, ensure_ascii=False).encode()
    except UsageError:
        raise
    except UnicodeEncodeError as error:
        raise UsageError(f"{source} contains half of a surrogate pair, which is no character; {_AGAIN}.") from error
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return None
        raise UsageError(f"{source} is damaged: it is no JSON; {_AGAIN}.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{source} is damaged: it is no JSON object; {_AGAIN}.")
    return values

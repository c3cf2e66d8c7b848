"""The streams and files of a command: text in and out, robust to closed or full files and other encodings."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from et_jax.errors import UsageError
from et_jax.io.texts import decoded

STANDARD_INPUT_BYTES = 16 * 2**20  # the longest prompt that is read: about four million tokens
STANDARD_OUTPUT = "standard output"


def read_standard_input() -> str:
    """Return the text on standard input, at most STANDARD_INPUT_BYTES.

    Raises UsageError if it is closed, too long, or not UTF-8.
    """
    if sys.stdin is None:
        raise UsageError("Standard input is closed; pipe the prompt into it, or give it with --prompt.")
    try:
        data = sys.stdin.buffer.read(STANDARD_INPUT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Standard input cannot be read ({error.strerror}); pipe a text into it.") from error
    if len(data) > STANDARD_INPUT_BYTES:
        raise UsageError(f"Standard input has more than {STANDARD_INPUT_BYTES >> 20} MiB; give a shorter prompt.")
    try:
        return decoded(data)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Standard input is not UTF-8 (byte {data[error.start]:#04x} at {error.start}); convert it to UTF-8."
        ) from error


def check_standard_output() -> None:
    """Raise UsageError if there is no standard output for the text."""
    if sys.stdout is None:
        raise UsageError("Standard output is closed, and the text goes there; send it to a file, or to /dev/null.")


def open_text(path: str) -> "Stream":
    """Open a file for streamed text; its errors name it. Raises UsageError if it cannot be opened."""
    try:
        # A lone surrogate is escaped as in JSON.
        return Stream(Path(path).open("w", encoding="utf-8", errors="backslashreplace"), path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file.") from error


class Stream:
    """A text stream whose errors name it; a `spare` one drops what it cannot write, and the work continues."""

    def __init__(self, stream: TextIO, name: str, *, spare: bool = False) -> None:
        self._stream, self._name, self._spare, self._failed = stream, name, spare, False

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def close(self) -> None:
        self._attempt(self._stream.close)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def _attempt(self, method: Callable[..., Any], *arguments: str) -> None:
        try:
            method(*arguments)
        except OSError as error:
            if not self._failed:
                self._failed = True
                _drain(self._stream)
                if not self._spare:
                    raise OSError(error.errno, error.strerror, self._name) from error

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _drain(stream: TextIO) -> None:
    """Drop the unwritten data of a failed stream, so that the end of the process does not fail at it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Prepare the standard streams: no standard descriptor is left closed, and every text can be printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a library's error message goes to whatever got the 2
        continue
    os.close(number)
    out, err = sys.stdout, sys.stderr
    errors = out.errors if isinstance(out, io.TextIOWrapper) else None
    with contextlib.ExitStack() as stack:
        if out is not None:
            if isinstance(out, io.TextIOWrapper):
                out.reconfigure(errors="backslashreplace")
            sys.stdout = Stream(out, STANDARD_OUTPUT)
        # None would mean standard output wherever something is printed.
        words = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if err is None else err
        sys.stderr = Stream(words, "standard error", spare=True)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
            if isinstance(out, io.TextIOWrapper):
                out.reconfigure(errors=errors)

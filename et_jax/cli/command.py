"""The edges of a command: arguments, streams, the signals that end it, and the sentence and number it ends with.

Nothing here imports JAX before the arguments are read.
"""

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TextIO

from et_jax.io.terminal import takes_escapes

FAILED, USAGE = 1, 2  # exit codes; that of a signal is 128 and its number, as shells say it
READER_GONE = 141  # which is that of SIGPIPE
STANDARD_INPUT_BYTES = 16 * 2**20  # the most that is read of a prompt: about four million tokens
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_STANDARD_OUTPUT = "standard output"


class Signals:
    """What a command does when it is told to end: by Ctrl-C, SIGTERM, or a terminal that goes away (SIGHUP).

    It says `said` and ends at once, whatever the main thread waits for. After `hold`, when there is
    something to finish, the first signal is only noted, as `number`, and the second ends it. Signals that
    were ignored when it began stay ignored.
    """

    def __init__(self) -> None:
        self.said = "interrupted"
        self.number: int | None = None
        self._held = False
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    @property
    def code(self) -> int:
        """The exit code of the signal noted, 0 where there was none."""
        return 0 if self.number is None else 128 + self.number

    def noted(self) -> bool:
        """Return whether there was a signal since `hold`."""
        return self.number is not None

    def hold(self) -> Callable[[], bool]:
        """From now on there is something to finish: note the first signal. Returns `noted`."""
        self._held = True
        return self.noted

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # elsewhere signals are the caller's business
            # The main thread may be in a compiler for a minute, where no handler runs: another thread listens.
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._thread = threading.Thread(target=self._listen, args=(reader,), name="et_jax signals", daemon=True)
            self._thread.start()
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in _heeded():
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._writer)
            self._thread.join()

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] not in self._before:
                continue
            if self._held and self.number is None:
                self.number = number[0]
            else:
                _end(self.said, number[0])
        os.close(reader)


def guard() -> None:
    """Have signals before and after `run` end the process without a traceback; for a process of its own."""
    for number in _heeded():
        signal.signal(number, lambda number, _: _end("interrupted", number))


def _heeded() -> list[int]:
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _end(said: str, number: int) -> None:
    """End without waiting for anybody: the locks of streams may be held, and threads at work."""
    shown = "\x1b[?25h" if takes_escapes(sys.__stderr__) else ""  # a progress bar hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, f"{shown}\n{said}\n".encode(errors="backslashreplace"))
    os._exit(128 + number)


def run(
    parser: Callable[[], argparse.ArgumentParser],
    command: Callable[[argparse.Namespace, Signals], int],
    arguments: list[str] | None,
    *,
    texts: Collection[str],
) -> int:
    """Run a command and return its exit code; what it cannot do ends in one sentence on standard error.

    `texts` names the arguments that are texts, not files or numbers.
    """
    with _standard_streams(), Signals() as signals:
        args = parser().parse_args(arguments)
        from et_jax.errors import UsageError

        try:
            _check_encoding(args, texts)
            code = command(args, signals)
            if sys.stdout is not None:
                sys.stdout.flush()
            return code
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            return USAGE
        except KeyboardInterrupt:  # in another thread than the main one, or from a library
            print(f"\n{signals.said}", file=sys.stderr)
            return 128 + signal.SIGINT
        except OSError as error:
            if isinstance(error, BrokenPipeError) and error.filename == _STANDARD_OUTPUT:
                return READER_GONE
            print(f"error: {sentence(error)}; what was printed so far is kept.", file=sys.stderr)
            return FAILED


def sentence(error: OSError) -> str:
    """Return which file failed, and why."""
    return f"{error.filename or 'a file'}: {error.strerror or error}"


def _check_encoding(args: argparse.Namespace, texts: Collection[str]) -> None:
    """Read every text as UTF-8, whatever the locale says, and refuse what is none."""
    from et_jax.errors import UsageError

    for name, value in vars(args).items():
        if isinstance(value, list) and name in texts:
            setattr(args, name, [_decoded(name, one) for one in value])
        elif isinstance(value, str) and name in texts:
            setattr(args, name, _decoded(name, value))
        elif any(_is_mangled(str(one)) for one in (value if isinstance(value, list) else [value])):
            raise UsageError(
                f"--{name.replace('_', '-')} is {str(value)!r}, which this locale's {sys.getfilesystemencoding()} "
                "cannot spell; choose another name, or a locale such as C.UTF-8."
            )


def _is_mangled(value: str) -> bool:
    return any("\ud800" <= letter <= "\udfff" for letter in value)


def _decoded(name: str, value: str) -> str:
    from et_jax.errors import UsageError

    if not _is_mangled(value):
        return value
    try:
        return os.fsencode(value).decode()
    except UnicodeError as error:
        raise UsageError(f"--{name.replace('_', '-')} is not UTF-8; give it as UTF-8 text.") from error


def read_standard_input() -> str:
    """Return the text on standard input, of STANDARD_INPUT_BYTES at most.

    Raises UsageError where it is closed, endless, or no text.
    """
    from et_jax.errors import UsageError

    if sys.stdin is None:
        raise UsageError("Standard input is closed; pipe the prompt into it, or give it with --prompt.")
    try:
        data = sys.stdin.buffer.read(STANDARD_INPUT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Standard input cannot be read ({error.strerror}); pipe a text into it.") from error
    if len(data) > STANDARD_INPUT_BYTES:
        raise UsageError(f"Standard input holds more than {STANDARD_INPUT_BYTES >> 20} MiB; give a shorter prompt.")
    try:
        return decoded(data)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"Standard input is not UTF-8 (byte {data[error.start]:#04x} at {error.start}); convert it to UTF-8."
        ) from error


def decoded(data: bytes) -> str:
    """Return the text of a file, with ends of lines of one kind. Raises UnicodeDecodeError where it is not UTF-8."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()


def check_standard_output() -> None:
    """Raise UsageError where there is no standard output for the text."""
    from et_jax.errors import UsageError

    if sys.stdout is None:
        raise UsageError("Standard output is closed, and the text goes there; send it to a file, or to /dev/null.")


def open_text(path: str) -> "Stream":
    """Open a file for text that comes bit by bit; its failures name it. Raises UsageError where it cannot be."""
    from et_jax.errors import UsageError

    try:
        # A lone surrogate is escaped as JSON does it.
        return Stream(Path(path).open("w", encoding="utf-8", errors="backslashreplace"), path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file.") from error


def check_writable(path: str) -> None:
    """Find out whether a file can be written, and leave it as it is. Raises UsageError where it cannot."""
    from et_jax.errors import UsageError

    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            raise UsageError(f"{path} is not a regular file; choose another file.")
        new = not file.exists()
        file.open("ab").close()
        if new:
            file.unlink()
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); choose another file.") from error


def named(path: str, write: Callable[[], None]) -> None:
    """Have what fails in `write`, within libraries that do not say to which file, name `path`."""
    try:
        write()
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from error


def tried(write: Callable[[], None]) -> bool:
    """Write one of the files beside the text, and return whether that worked; if not, say so and go on."""
    from et_jax.errors import UsageError

    try:
        write()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return False
    except OSError as error:
        print(f"error: {sentence(error)}; what was printed is complete.", file=sys.stderr)
        return False
    return True


class Stream:
    """A text stream whose failures name it; a `spare` one drops what it cannot take, and the work goes on."""

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
    """Let go of what a stream that failed still holds, so that the end of the process does not fail at it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def _standard_streams() -> Iterator[None]:
    """Make the streams fit for work: no closed number is left for another file, and every text can be printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # else a library's complaint lands in whatever got the 2
        continue
    os.close(number)
    out, err = sys.stdout, sys.stderr
    errors = out.errors if isinstance(out, io.TextIOWrapper) else None
    with contextlib.ExitStack() as stack:
        if out is not None:
            if isinstance(out, io.TextIOWrapper):
                out.reconfigure(errors="backslashreplace")
            sys.stdout = Stream(out, _STANDARD_OUTPUT)
        # None would stand for standard output wherever something is printed.
        words = stack.enter_context(open(os.devnull, "w", encoding="utf-8")) if err is None else err
        sys.stderr = Stream(words, "standard error", spare=True)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
            if isinstance(out, io.TextIOWrapper):
                out.reconfigure(errors=errors)

"""The signals that end a command: Ctrl-C, SIGTERM, a closing terminal."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from et_jax.io.terminal import takes_escapes

_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")


class Signals:
    """The handling of Ctrl-C, SIGTERM and a closing terminal (SIGHUP) in a command.

    A signal prints `said` and ends the command at once, whatever the main thread waits for. After `defer`, while
    there is work to finish, the first signal is only recorded, as `number`, and the second ends the command. Signals
    that were ignored at the start stay ignored.
    """

    def __init__(self) -> None:
        self.said = "interrupted"
        self.number: int | None = None
        self._deferred = False
        self._before: dict[int, Any] = {}
        self._thread: threading.Thread | None = None

    @property
    def code(self) -> int:
        """The exit code of the recorded signal, 0 without one."""
        return 0 if self.number is None else 128 + self.number

    def received(self) -> bool:
        """Return whether there was a signal since `defer`."""
        return self.number is not None

    def defer(self) -> Callable[[], bool]:
        """Record the first signal from now on, because there is work to finish. Returns `received`."""
        self._deferred = True
        return self.received

    def forget(self) -> None:
        """Clear the recorded signal: the next one is recorded again."""
        self.number = None

    @contextlib.contextmanager
    def asking(self) -> Generator[None]:
        """While a line is read, Ctrl-C raises KeyboardInterrupt, and other signals end the command.

        They restore the terminal's settings.
        """
        if self._thread is None:  # the caller handles signals
            yield
            return
        put_back = _terminal()

        def end(number: int, _: Any) -> None:
            put_back()
            _end(self.said, number)

        try:
            signal.set_wakeup_fd(-1)  # the main thread, which waits for a line, runs the handlers itself
            for number in self._before:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else end)
            yield
        finally:
            for number in self._before:
                signal.signal(number, lambda *_: None)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # elsewhere the caller handles signals
            # The main thread may compile for a minute, in which no handler runs: another thread listens.
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._thread = threading.Thread(target=self._listen, args=(reader,), name="et_jax signals", daemon=True)
            self._thread.start()
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in _handled():
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
            if self._deferred and self.number is None:
                self.number = number[0]
            else:
                _end(self.said, number[0])
        os.close(reader)


def _terminal() -> Callable[[], None]:
    """Return a function that restores the settings of standard input's terminal; a no-op without one."""
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import termios

        with contextlib.suppress(termios.error):
            number = sys.stdin.fileno()
            known = termios.tcgetattr(number)
            return lambda: termios.tcsetattr(number, termios.TCSANOW, known)
    return lambda: None


def guard() -> None:
    """Let signals before and after `run` end the process without a traceback; for a process of its own."""
    for number in _handled():
        signal.signal(number, lambda number, _: _end("interrupted", number))


def _handled() -> list[int]:
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _end(said: str, number: int) -> None:
    """End without waiting: locks of streams may be taken, and threads at work."""
    shown = "\x1b[?25h" if takes_escapes(sys.__stderr__) else ""  # a progress bar hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, f"{shown}\n{said}\n".encode(errors="backslashreplace"))
    os._exit(128 + number)

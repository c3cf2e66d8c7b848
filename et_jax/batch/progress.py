"""The progress of a running job on standard error: a bar on a terminal, otherwise a line every few seconds."""

import sys
import time
from types import TracebackType

from et_jax.io.terminal import takes_escapes

LINE_SECONDS = 10.0  # between two lines if standard error is not a terminal
_LEAST_SECONDS = 1.0  # of work before a remaining time is shown


class Progress:
    """Lines done of all, tokens per second, and the remaining time at the pace so far.

    The pace counts answered lines only, because error rows take no time. The remaining time is not shown before there
    is a pace, nor if no line has ended for longer than that time.
    """

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._total, self._done, self._answered, self._tokens = total, done, 0, 0
        self._began = self._said = self._moved = time.monotonic()
        console = Console(stderr=True)
        self._bar = Bar(BarColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task(self._state(), total=total, completed=done)
        self._terminal = takes_escapes(sys.stderr)

    def __enter__(self) -> "Progress":
        if self._terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._bar.stop()

    def show(self, done: int, answered: int, tokens: int) -> None:
        """Show that `done` lines have their rows; this run answered `answered` of them, with `tokens` tokens."""
        if answered > self._answered:
            self._moved = time.monotonic()
        self._done, self._answered, self._tokens = done, answered, tokens
        if self._terminal:
            self._bar.update(self._task, completed=done, description=self._state())
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(self._state(), file=sys.stderr, flush=True)

    def _state(self) -> str:
        now = time.monotonic()
        elapsed = now - self._began
        state = f"{self._done} of {self._total} lines"
        if elapsed > 0 and self._tokens:
            state += f", {self._tokens / elapsed:.1f} tokens/s"
        if self._answered and self._done < self._total and elapsed >= _LEAST_SECONDS:
            left = (self._total - self._done) * elapsed / self._answered
            if left >= now - self._moved:
                state += f", {_duration(left)} left"
        return state


def _duration(seconds: float) -> str:
    if seconds < 1:
        return "under 1 s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

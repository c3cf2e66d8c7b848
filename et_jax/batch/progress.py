"""What a running job says on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from et_jax.terminal import takes_escapes

LINE_SECONDS = 10.0  # between two lines where standard error is no terminal


class Progress:
    """Lines done of all, tokens per second, and the time left at the pace so far."""

    def __init__(self, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self._total, self._before, self._done, self._tokens = total, done, done, 0
        self._began = self._said = time.monotonic()
        self._bar = Bar(BarColumn(), TextColumn("{task.description}"), console=Console(stderr=True))
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

    def show(self, done: int, tokens: int) -> None:
        """Say that `done` lines have their rows and `tokens` were produced in this run."""
        self._done, self._tokens = done, tokens
        if self._terminal:
            self._bar.update(self._task, completed=done, description=self._state())
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(self._state(), file=sys.stderr, flush=True)

    def _state(self) -> str:
        elapsed = time.monotonic() - self._began
        state = f"{self._done} of {self._total} lines"
        if elapsed > 0 and self._tokens:
            state += f", {self._tokens / elapsed:.1f} tokens/s"
        if finished := self._done - self._before:
            state += f", {_duration((self._total - self._done) * elapsed / finished)} left"
        return state


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"

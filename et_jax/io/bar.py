"""A progress bar on standard output, or in a notebook."""

import sys
import time

from et_jax.io import html
from et_jax.io.cell import Area, in_notebook
from et_jax.io.terminal import takes_escapes


class Bar:
    """A bar over `total` pieces of work and the tokens they produce, or nothing without a total."""

    def __init__(self, total: int | None) -> None:
        self._total, self._tokens, self._bar = total, 0, None

    def __enter__(self) -> "Bar":
        if self._total is not None:
            self._bar = _InNotebook(self._total) if in_notebook() else _OnStream(self._total)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def count(self, *, token: bool, ended: bool) -> None:
        """Count a token, and a finished piece of work."""
        if self._bar is None:
            return
        self._tokens += token
        if ended:
            rate = self._tokens / (time.perf_counter() - self._began)
            self._bar.advance(f"{rate:.0f} tokens/s")


class _OnStream:
    """A bar on standard output; if the stream cannot be rewritten, the last state is printed at the end."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
        console = Console(force_terminal=None if takes_escapes(sys.stdout) else False)
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=total)
        self._bar.start()

    def advance(self, rate: str) -> None:
        self._bar.update(self._task, advance=1, description=rate)

    def stop(self) -> None:
        self._bar.stop()


class _InNotebook:
    """A bar in the output of a cell."""

    def __init__(self, total: int) -> None:
        self._total, self._ended, self._rate, self._area = total, 0, "", Area()
        self._area.draw(self._drawn)

    def advance(self, rate: str) -> None:
        self._ended, self._rate = self._ended + 1, rate
        self._area.draw(self._drawn)

    def stop(self) -> None:
        self._area.draw(self._drawn, last=True)

    def _drawn(self) -> tuple[str, str]:
        said = f"{self._ended}/{self._total} {self._rate}".strip()
        return html.boxed(html.progress(self._ended, self._total, said)), said

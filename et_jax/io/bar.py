"""A progress bar on standard output."""

import sys
import time

from et_jax.io.terminal import takes_escapes


class Bar:
    """A bar over `total` pieces of work and the tokens they bring, or nothing where there is no total."""

    def __init__(self, total: int | None) -> None:
        self._total, self._tokens, self._bar = total, 0, None

    def __enter__(self) -> "Bar":
        if self._total is not None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            # Where nothing can be rewritten, the last state is printed at the end.
            console = Console(force_terminal=None if takes_escapes(sys.stdout) else False)
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def count(self, *, token: bool, ended: bool) -> None:
        """Count a token, and a piece of work that ended."""
        if self._bar is None:
            return
        self._tokens += token
        if ended:
            rate = self._tokens / (time.perf_counter() - self._began)
            self._bar.update(self._task, advance=1, description=f"{rate:.0f} tokens/s")

"""One caller's requests: the continuations they ask for, their events, a bar that shows how far they are."""

import collections
import dataclasses
import sys
import time
from typing import Any

from et_jax.io.terminal import takes_escapes
from et_jax.serve.continuation import Continuation
from et_jax.serve.queue import Sequence
from et_jax.serve.replicas import Replicas
from et_jax.serve.requests import Completion, GenerationRequest, TokenEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A continuation about to start, and the request that asks for it."""

    request: GenerationRequest
    continuation: Continuation


class Call:
    """One caller's sequences under way, and the events that have come of them."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.events: collections.deque[TokenEvent] = collections.deque()
        self.under_way: dict[Continuation, Sequence] = {}

    def submit(self, text: Text) -> None:
        """Put a text in the queue."""
        continuation, request, queue = text.continuation, text.request, self._replicas.queue

        def deliver(event: TokenEvent) -> None:
            self.events.append(event)
            if event.completion is not None:
                del self.under_way[continuation]

        with queue.lock:
            self.under_way[continuation] = queue.submit(
                continuation, deliver, priority=request.priority, deadline=request.deadline
            )

    def advance(self) -> None:
        """Wait for a round, unless one has brought something meanwhile."""
        self._replicas.advance(unless=lambda: bool(self.events) or not self.under_way)

    def cancel(self) -> None:
        """End what is under way with what it has."""
        if self.under_way and not self._replicas.broken:
            self._replicas.cancel(list(self.under_way.values()))


class Bar:
    """A progress bar over continuations, or nothing where there is no total."""

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

    def take(self, event: TokenEvent) -> None:
        """Count a token, and a continuation that ended."""
        if self._bar is None:
            return
        self._tokens += event.trace is not None
        if event.completion is not None:
            rate = self._tokens / (time.perf_counter() - self._began)
            self._bar.update(self._task, advance=1, description=f"{rate:.0f} tokens/s")


def refused(index: int, request: Any, sentence: str) -> TokenEvent:
    """The only event of a request that cannot be served."""
    completion = Completion(
        prompt=request.prompt if isinstance(request, GenerationRequest) and isinstance(request.prompt, str) else "",
        prompt_tokens=0,
        index=0,
        text="",
        token_ids=(),
        finish_reason="error",
        trace=(),
        error=sentence,
    )
    return TokenEvent(prompt_index=index, index=0, text="", trace=None, completion=completion)

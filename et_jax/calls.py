"""One caller's requests: the continuations they ask for, their events, a bar that shows how far they are."""

import collections
import dataclasses
import time

from et_jax.batching import Batcher, Sequence
from et_jax.continuation import Continuation
from et_jax.requests import Completion, GenerationRequest, TokenEvent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A continuation about to start, and the request that asks for it."""

    request: GenerationRequest
    continuation: Continuation


class Call:
    """One caller's sequences in a batcher, and the events that have come of them."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self.events: collections.deque[TokenEvent] = collections.deque()
        self.under_way: dict[Continuation, Sequence] = {}

    def submit(self, text: Text) -> None:
        """Put a text in the batcher's queue."""
        continuation, request = text.continuation, text.request

        def deliver(event: TokenEvent) -> None:
            self.events.append(event)
            if event.completion is not None:
                del self.under_way[continuation]

        with self._batcher.lock:
            self.under_way[continuation] = self._batcher.submit(
                continuation, deliver, priority=request.priority, deadline=request.deadline
            )

    def advance(self) -> None:
        """Run a round, unless another stream's round has brought something meanwhile."""
        with self._batcher.lock:
            if not self.events and self.under_way:
                if self._batcher.broken:
                    raise RuntimeError("another stream of this model failed while it held the cache; start anew")
                self._batcher.advance()

    def cancel(self) -> None:
        """End what is under way with what it has."""
        with self._batcher.lock:
            if not self._batcher.broken:
                for sequence in list(self.under_way.values()):
                    self._batcher.cancel(sequence)


class Bar:
    """A progress bar over continuations, or nothing where there is no total."""

    def __init__(self, total: int | None) -> None:
        self._total, self._tokens, self._bar = total, 0, None

    def __enter__(self) -> "Bar":
        if self._total is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
            self._bar = Progress(*columns)
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


def refused(index: int, request: GenerationRequest, sentence: str) -> TokenEvent:
    """The only event of a request that cannot be served."""
    completion = Completion(
        prompt=request.prompt if isinstance(request.prompt, str) else "",
        prompt_tokens=0,
        index=0,
        text="",
        token_ids=(),
        finish_reason="error",
        trace=(),
        error=sentence,
    )
    return TokenEvent(prompt_index=index, index=0, text="", trace=None, completion=completion)

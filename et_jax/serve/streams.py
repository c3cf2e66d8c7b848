"""One caller's sequences under way, and the events that come of them."""

import collections
from collections.abc import Callable, Generator, Iterable

from et_jax.serve.completions import TokenEvent
from et_jax.serve.replicas import Replicas
from et_jax.serve.sequence import Sequence


class Call:
    """What one caller has asked of replicas: the sequences under way, and the events not yet handed over."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.events: collections.deque[TokenEvent] = collections.deque()
        self.under_way: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        """Put a sequence in the queue."""

        def deliver(event: TokenEvent) -> None:
            self.events.append(event)
            if event.completion is not None:
                self.under_way.remove(sequence)

        with self._replicas.queue.lock:
            self.under_way.append(sequence)
            self._replicas.queue.submit(sequence, deliver)

    def advance(self) -> None:
        """Wait for a round, unless one has brought something meanwhile."""
        self._replicas.advance(unless=lambda: bool(self.events) or not self.under_way)

    def cancel(self) -> None:
        """End what is under way with what it has."""
        if self.under_way and not self._replicas.broken:
            self._replicas.cancel(list(self.under_way))


def serve(
    replicas: Replicas,
    asked: Iterable[Sequence | TokenEvent],
    *,
    ahead: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[TokenEvent]:
    """Submit what is asked, at most `ahead` sequences at a time, and yield their events.

    An event among them is passed on. Once `cancelled` answers True, or the generator is closed, all that is under way
    ends with what it has.
    """
    call, source, exhausted = Call(replicas), iter(asked), False
    try:
        while True:
            while not exhausted and not call.events and len(call.under_way) < ahead:
                item = next(source, None)
                exhausted = item is None
                if isinstance(item, TokenEvent):
                    call.events.append(item)
                elif item is not None:
                    call.submit(item)
            over = exhausted and not call.under_way  # asked before the events, for rounds go on meanwhile
            if call.events:
                while call.events:
                    yield call.events.popleft()
                continue
            if over:
                return
            if cancelled():
                call.cancel()
                yield from call.events
                return
            call.advance()
    finally:
        call.cancel()

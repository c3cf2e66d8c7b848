"""The unfinished sequences of a call, and their events."""

import collections
from collections.abc import Callable, Generator, Iterable

from et_jax.serve.completions import TokenEvent
from et_jax.serve.replicas import Replicas
from et_jax.serve.sequence import Sequence


class Call:
    """A call's unfinished sequences on some replicas, and the events not yet yielded to the caller."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.events: collections.deque[TokenEvent] = collections.deque()
        self.under_way: list[Sequence] = []

    def submit(self, sequence: Sequence) -> None:
        """Add a sequence to the queue."""
        events, under_way = self.events, self.under_way  # so that a sequence does not reference its call

        def deliver(event: TokenEvent) -> None:
            events.append(event)
            if event.completion is not None:
                under_way.remove(sequence)

        self._replicas.use.check()
        with self._replicas.queue.lock:
            under_way.append(sequence)
            self._replicas.queue.submit(sequence, deliver)

    def advance(self) -> None:
        """Wait for a round, unless events have arrived or no sequence is unfinished."""
        self._replicas.use.check()
        self._replicas.advance(unless=lambda: bool(self.events) or not self.under_way)

    def abandon(self) -> None:
        """Mark the unfinished sequences, so that the next round ends them with their tokens so far.

        The garbage collector may close a stream in any thread at any moment: in a replica's, which holds its locks, or
        at interpreter exit. So this only sets a flag, without a lock.
        """
        for sequence in list(self.under_way):
            sequence.abandoned = True


def serve(
    replicas: Replicas,
    asked: Iterable[Sequence | TokenEvent],
    *,
    ahead: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[TokenEvent]:
    """Submit the sequences of `asked`, at most `ahead` at a time, and yield their events.

    An event in `asked` is yielded as it is. Once `cancelled` returns True, no more sequences are taken from `asked`,
    and unfinished ones end with their tokens so far. Closing or collecting the generator ends them without events.
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
            over = exhausted and not call.under_way  # read before the events, because rounds run concurrently
            if call.events:
                while call.events:
                    yield call.events.popleft()
                continue
            if over:
                return
            if cancelled():
                exhausted = True
                call.abandon()
            call.advance()
    finally:
        call.abandon()

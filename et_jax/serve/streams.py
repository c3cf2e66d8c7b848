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
        events, under_way = self.events, self.under_way  # all that a sequence in a slot needs to hold of its call

        def deliver(event: TokenEvent) -> None:
            events.append(event)
            if event.completion is not None:
                under_way.remove(sequence)

        self._replicas.use.check()
        with self._replicas.queue.lock:
            under_way.append(sequence)
            self._replicas.queue.submit(sequence, deliver)

    def advance(self) -> None:
        """Wait for a round, unless one has brought something meanwhile."""
        self._replicas.use.check()
        self._replicas.advance(unless=lambda: bool(self.events) or not self.under_way)

    def abandon(self) -> None:
        """Have the next round end what is under way with what it has.

        The garbage collector may close a stream in any thread at any moment: in a replica's, which holds its locks, or
        when the interpreter ends. So nothing is done here but to set a mark, without a lock.
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
    """Submit what is asked, at most `ahead` sequences at a time, and yield their events.

    An event among them is passed on. Once `cancelled` answers True, no more are asked for, and all that is under way
    ends with what it has; so it does, unheard of, when the generator is closed or collected.
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
                exhausted = True
                call.abandon()
            call.advance()
    finally:
        call.abandon()

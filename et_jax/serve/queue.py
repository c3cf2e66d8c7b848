"""Who waits for a slot, whichever replica it is of."""

import dataclasses
import threading
import time
from collections.abc import Callable, Sized

from et_jax.decode import cache
from et_jax.decode.slots import Row
from et_jax.serve import scheduler
from et_jax.serve.continuation import Continuation
from et_jax.serve.requests import TokenEvent


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """A continuation on its way through the engine, and what to call with everything that comes of it.

    `arrival` numbers submissions, `turn` first seatings. `length` tokens of it are in the cache, on
    `blocks` pages, of which `shared` are kept for other prompts too. Those in `kept` hold the beginning of
    its prompt and stay kept while it sits. It is `ready` once its prompt is prefilled. `row` and `taken`
    are its slot and its pages while it is on the host.
    """

    text: Continuation
    deliver: Callable[[TokenEvent], None]
    priority: float
    deadline: float | None
    arrival: int
    arrived: float
    turn: int = 0
    slot: int | None = None
    length: int = 0
    blocks: int = 0
    shared: int = 0
    kept: list[int] = dataclasses.field(default_factory=list)
    begun: bool = False
    ready: bool = False
    admitted: float | None = None
    row: Row | None = None
    swapped: list[cache.KVCache] = dataclasses.field(default_factory=list)


class Queue:
    """The sequences that wait, in one line before all replicas.

    Who touches the line, or the host's side of any replica, holds the lock. A replica that waits for its
    device lets go of it, and another goes on.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Sequence] = []
        self._replicas: list[Sized] = []
        self._arrivals = self._turns = 0

    def join(self, running: Sized) -> None:
        """Serve one more replica; `seated` always counts those in its slots."""
        self._replicas.append(running)

    def submit(
        self,
        text: Continuation,
        deliver: Callable[[TokenEvent], None],
        *,
        priority: float = 0.0,
        deadline: float | None = None,
    ) -> Sequence:
        """Put a continuation in the line; `deliver` is called with its events from within rounds."""
        sequence = Sequence(
            text=text,
            deliver=deliver,
            priority=priority,
            deadline=deadline,
            arrival=self._arrivals,
            arrived=time.monotonic(),
        )
        self._arrivals += 1
        self.waiting.append(sequence)
        return sequence

    def admit(
        self, num_running: int, num_free: int, num_pages: int, pages: Callable[[Sequence], int]
    ) -> list[Sequence]:
        """Take those out of the line who may sit now in a replica that has these slots and pages free.

        `pages` says what a sequence needs to start or to go on. A replica where `num_running` sit takes no
        more than makes its share of all who sit or wait.
        """
        everybody = len(self.waiting) + sum(len(running) for running in self._replicas)
        share = -(-everybody // len(self._replicas))
        now = time.monotonic()
        claims = [
            scheduler.Waiting(
                arrival=sequence.arrival,
                priority=sequence.priority,
                deadline=sequence.deadline,
                waited=now - sequence.arrived,
                pages=pages(sequence),
                started=sequence.row is not None,
            )
            for sequence in self.waiting
        ]
        num_slots = max(0, min(num_free, share - num_running))
        chosen = [self.waiting[i] for i in scheduler.admitted(claims, num_slots, num_pages, num_running)]
        for sequence in chosen:
            self.waiting.remove(sequence)
            if sequence.admitted is None:
                sequence.admitted, sequence.turn = now, self._turns
                self._turns += 1
        return chosen

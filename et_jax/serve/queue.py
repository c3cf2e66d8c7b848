"""The sequences that wait for a slot of any replica, in one line."""

import threading
import time
from collections.abc import Callable, Sized

from et_jax.serve import scheduler
from et_jax.serve.completions import TokenEvent
from et_jax.serve.memory.page_pool import PagePool
from et_jax.serve.sequence import Sequence


class Queue:
    """The sequences that wait, in one line before all replicas.

    Its lock is held by each thread that touches the line, or the host's side of any replica. A replica that waits for
    its device lets go of it, and another goes on.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Sequence] = []
        self._replicas: list[Sized] = []
        self._arrivals = self._turns = 0

    def join(self, running: Sized) -> None:
        """Serve one more replica; `running` always counts the sequences in its slots."""
        self._replicas.append(running)

    def submit(self, sequence: Sequence, deliver: Callable[[TokenEvent], None]) -> None:
        """Put a sequence in the line; `deliver` is called with its events from within rounds."""
        sequence.deliver, sequence.arrival, sequence.arrived = deliver, self._arrivals, time.monotonic()
        self._arrivals += 1
        self.waiting.append(sequence)

    def admit(self, num_running: int, num_free: int, pool: PagePool) -> list[Sequence]:
        """Take those out of the line that a replica with these slots and pages may admit now.

        A replica with `num_running` sequences takes no more than makes its share of all that run or wait.
        """
        total = len(self.waiting) + sum(len(running) for running in self._replicas)
        share = -(-total // len(self._replicas))
        now = time.monotonic()
        num_slots = max(0, min(num_free, share - num_running))
        chosen = scheduler.admitted(self.waiting, pool, now=now, num_slots=num_slots, num_running=num_running)
        for sequence in chosen:
            self.waiting.remove(sequence)
            if sequence.admitted is None:
                sequence.admitted, sequence.turn = now, self._turns
                self._turns += 1
        return chosen

"""The queue of sequences that wait for a slot of any replica."""

import threading
import time
from collections.abc import Callable, Sized
from typing import Any

import jax

from et_jax.serve import scheduler
from et_jax.serve.completions import TokenEvent
from et_jax.serve.memory.page_pool import PagePool
from et_jax.serve.sequence import Sequence


class Queue:
    """The waiting sequences, shared by all replicas.

    A thread acquires the lock to touch the queue or the host side of any replica. A replica that waits for its device
    releases it, so that another replica can run.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Sequence] = []
        self._replicas: list[Sized] = []
        self._arrivals = self._turns = 0

    def join(self, running: Sized) -> None:
        """Add a replica; the length of `running` is always the number of sequences in its slots."""
        self._replicas.append(running)

    def submit(self, sequence: Sequence, deliver: Callable[[TokenEvent], None]) -> None:
        """Add a sequence to the queue; rounds call `deliver` with its events."""
        sequence.deliver, sequence.arrival, sequence.arrived = deliver, self._arrivals, time.monotonic()
        self._arrivals += 1
        self.waiting.append(sequence)

    def admit(self, num_running: int, num_free: int, pool: PagePool) -> list[Sequence]:
        """Remove and return the sequences that a replica with these slots and pages may admit now.

        A replica with `num_running` sequences takes at most its equal share of all running and waiting sequences.
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

    def fetched(self, tree: Any) -> Any:
        """Return arrays of a device as numpy arrays; other replicas can run while the caller waits for them."""
        self.lock.release()
        try:
            return jax.device_get(tree)
        finally:
            self.lock.acquire()

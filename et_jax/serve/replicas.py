"""Replicas: equal replicas before one queue, whose rounds run side by side."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from et_jax.serve.queue import Queue
from et_jax.serve.replica import Replica
from et_jax.serve.sequence import Sequence


class Replicas:
    """Replicas that serve one queue, each in a thread of its own while it has something to do.

    Every round is asked for by `advance`: while no caller asks for events, nothing is computed.
    """

    def __init__(self, queue: Queue, replicas: list[Replica]) -> None:
        self.queue, self.replicas = queue, replicas
        self._workers = ThreadPoolExecutor(len(replicas), thread_name_prefix="et_jax")
        self._rounds: dict[Replica, Future[None]] = {}

    @property
    def broken(self) -> bool:
        """Whether a replica has lost its state."""
        return any(replica.broken for replica in self.replicas)

    @property
    def idle(self) -> bool:
        """Whether no sequence waits or is in a slot."""
        return all(replica.idle for replica in self.replicas)

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Compile every program that serving can need."""
        for replica in self.replicas:
            replica.warm_up(tell)

    def advance(self, unless: Callable[[], bool]) -> None:
        """Have every replica with something to do run a round, and return when one round has ended.

        Nothing happens where `unless` holds once the queue is at hand. An exception of a round is raised here.
        """
        with self.queue.lock:
            if unless():
                return
            if self.broken:
                raise RuntimeError("another stream of this model failed while it held the cache; start anew")
            self._rounds = {replica: running for replica, running in self._rounds.items() if not running.done()}
            for replica in self.replicas:
                if replica not in self._rounds and not replica.idle:
                    self._rounds[replica] = self._workers.submit(replica.advance)
            rounds = list(self._rounds.values())
        for ended in wait(rounds, return_when=FIRST_COMPLETED).done:
            ended.result()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """End those of the sequences that have not ended yet, as "abort", once the rounds under way are over."""
        with self._standing_still():
            for sequence in sequences:
                if sequence in self.queue.waiting:
                    self.queue.waiting.remove(sequence)
                    self.replicas[0].end(sequence)
                for replica in self.replicas:
                    if sequence in replica.slots.values():
                        replica.end(sequence)

    def forget_prefixes(self) -> None:
        """Evict every kept page that no sequence uses."""
        with self._standing_still():
            for replica in self.replicas:
                replica.forget_prefixes()

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Hold every replica between two rounds."""
        with contextlib.ExitStack() as held:
            for replica in self.replicas:
                held.enter_context(replica.lock)
            held.enter_context(self.queue.lock)
            yield

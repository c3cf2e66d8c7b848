"""Replicas: equal batchers before one queue, whose rounds run side by side."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from et_jax.serve.queue import Queue, Sequence
from et_jax.serve.replica import Batcher


class Replicas:
    """Batchers that serve one queue, each in a thread of its own while it has something to do.

    Every round is asked for by `advance`: where nobody asks for events, nothing is computed.
    """

    def __init__(self, queue: Queue, batchers: list[Batcher]) -> None:
        self.queue, self.batchers = queue, batchers
        self._workers = ThreadPoolExecutor(len(batchers), thread_name_prefix="et_jax")
        self._rounds: dict[Batcher, Future[None]] = {}

    @property
    def broken(self) -> bool:
        """Whether a replica has lost its state."""
        return any(batcher.broken for batcher in self.batchers)

    @property
    def idle(self) -> bool:
        """Whether nobody waits and nobody sits."""
        return all(batcher.idle for batcher in self.batchers)

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Compile every program that serving can need."""
        for batcher in self.batchers:
            batcher.warm_up(tell)

    def advance(self, unless: Callable[[], bool]) -> None:
        """Have every replica with something to do run a round, and return when one round has ended.

        Nothing happens where `unless` holds once the queue is at hand. An exception of a round is raised here.
        """
        with self.queue.lock:
            if unless():
                return
            if self.broken:
                raise RuntimeError("another stream of this model failed while it held the cache; start anew")
            self._rounds = {batcher: running for batcher, running in self._rounds.items() if not running.done()}
            for batcher in self.batchers:
                if batcher not in self._rounds and not batcher.idle:
                    self._rounds[batcher] = self._workers.submit(batcher.advance)
            rounds = list(self._rounds.values())
        for ended in wait(rounds, return_when=FIRST_COMPLETED).done:
            ended.result()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """End those of the sequences that have not ended yet, as "abort", once the rounds under way are over."""
        with self._standing_still():
            for sequence in sequences:
                if sequence in self.queue.waiting:
                    self.queue.waiting.remove(sequence)
                    self.batchers[0].end(sequence)
                for batcher in self.batchers:
                    if sequence in batcher.slots.values():
                        batcher.end(sequence)

    def forget_prefixes(self) -> None:
        """Let go of every kept page that no sequence uses."""
        with self._standing_still():
            for batcher in self.batchers:
                batcher.forget_prefixes()

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Hold every replica between two rounds."""
        with contextlib.ExitStack() as held:
            for batcher in self.batchers:
                held.enter_context(batcher.lock)
            held.enter_context(self.queue.lock)
            yield

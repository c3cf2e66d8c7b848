"""Replicas: equal replicas that share a queue and run their rounds concurrently."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from et_jax.decode.plant import Weights
from et_jax.models.model import put_like
from et_jax.serve.queue import Queue
from et_jax.serve.replica import Replica
from et_jax.serve.use import Use

T = TypeVar("T")


class Replicas:
    """Replicas that share a queue, each in its own thread while it has sequences, as long as `use` permits.

    `advance` starts every round: while no caller requests events, nothing is computed. Sequences that a caller has
    abandoned end with the next round.
    """

    def __init__(self, queue: Queue, replicas: list[Replica], use: Use) -> None:
        self.queue, self.replicas, self.use = queue, replicas, use
        self._workers = ThreadPoolExecutor(len(replicas), thread_name_prefix="et_jax")
        self._rounds: list[Future[None]] = []

    @property
    def broken(self) -> bool:
        """Whether a replica has lost its state."""
        return any(replica.broken for replica in self.replicas)

    @property
    def idle(self) -> bool:
        """Whether no sequence is in the queue or in a slot."""
        return all(replica.idle for replica in self.replicas)

    def warm_up(self, report: Callable[[str], None], drafts: bool) -> None:
        """Compile every program; without `drafts` the drafting program is compiled in the background."""
        for replica in self.replicas:
            replica.warm_up(report, drafts)

    def advance(self, unless: Callable[[], bool]) -> None:
        """Start a round on every replica that has sequences, and return when any round has ended.

        Does nothing if `unless` returns True once the queue's lock is acquired. An exception of a round is raised in
        every caller that waits for it.
        """
        with self.queue.lock:
            if unless():
                return
            if not self.broken:
                self._rounds = [each for each in self._rounds if not each.done() or each.exception()] + self._begun()
            rounds = self._rounds
        for ended in wait(rounds, return_when=FIRST_COMPLETED).done:
            ended.result()

    def _begun(self) -> list[Future[None]]:
        """Start a round of every replica that has sequences and no running round."""
        begun = []
        for replica in self.replicas:
            if not replica.under_way and not replica.idle:
                begun.append(self._workers.submit(replica.advance))
                replica.under_way = True  # the round waits for the queue's lock, which this thread holds
        return begun

    def end_abandoned(self) -> None:
        """End abandoned sequences as "abort" now, since there may be no further round."""
        with self.queue.lock:
            found = any(replica.slots.abandoned for replica in self.replicas)
        if found and not self.broken:
            with self._between_rounds():
                for replica in self.replicas:
                    replica.end_abandoned()

    def forget_prefixes(self) -> None:
        """Evict every cached prefix page that no sequence uses."""
        with self._between_rounds():
            for replica in self.replicas:
                replica.forget_prefixes()

    def each(self, run: Callable[[Replica], T]) -> list[T]:
        """Return the result of `run` for every replica, with all replicas locked."""
        with self._between_rounds():
            return [run(replica) for replica in self.replicas]

    def update(self, weights: Weights) -> None:
        """Use other weights of the same shapes from the next round on, and evict the pages of the old ones."""
        with self._between_rounds():
            for replica in self.replicas:
                replica.forget_prefixes()
                replica.device.weights = put_like(weights, replica.device.weights)

    def release(self) -> list[Replica]:
        """Return the replicas and drop the references to them, so that the last running round frees their memory."""
        replicas, self.replicas, self._rounds = self.replicas, [], []
        return replicas

    @contextlib.contextmanager
    def _between_rounds(self) -> Iterator[None]:
        """Lock every replica, between two rounds and with no burst in flight."""
        with contextlib.ExitStack() as locks:
            for replica in self.replicas:
                locks.enter_context(replica.lock)
            locks.enter_context(self.queue.lock)
            for replica in self.replicas:
                replica.drain()
            yield

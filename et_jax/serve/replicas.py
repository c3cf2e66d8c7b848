"""Replicas: equal replicas before one queue, whose rounds run side by side."""

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
    """Replicas that serve one queue, each in a thread of its own while it has something to do, as long as `use` allows.

    Every round is asked for by `advance`: while no caller asks for events, nothing is computed. What a caller has
    abandoned ends with the next round.
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
        """Whether no sequence waits or is in a slot."""
        return all(replica.idle for replica in self.replicas)

    def warm_up(self, tell: Callable[[str], None], drafts: bool) -> None:
        """Compile every program that serving can need, without `drafts` the one that drafts beside what follows."""
        for replica in self.replicas:
            replica.warm_up(tell, drafts)

    def advance(self, unless: Callable[[], bool]) -> None:
        """Have every replica with something to do run a round, and return when one round has ended.

        Nothing happens where `unless` holds once the queue is at hand. An exception of a round is raised here, in
        every caller, whenever the round has ended.
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
        """Begin a round of every replica that has something to do and none under way."""
        begun = []
        for replica in self.replicas:
            if not replica.under_way and not replica.idle:
                begun.append(self._workers.submit(replica.advance))
                replica.under_way = True  # it waits for the queue, which is held here
        return begun

    def end_abandoned(self) -> None:
        """End the sequences that nobody wants, as "abort", where no round is to come that does."""
        with self.queue.lock:
            found = any(replica.abandoned for replica in self.replicas)
        if found and not self.broken:
            with self._standing_still():
                for replica in self.replicas:
                    replica.end_abandoned()

    def forget_prefixes(self) -> None:
        """Evict every kept page that no sequence uses."""
        with self._standing_still():
            for replica in self.replicas:
                replica.forget_prefixes()

    def each(self, run: Callable[[Replica], T]) -> list[T]:
        """Return what `run` returns for every replica, which stands still meanwhile."""
        with self._standing_still():
            return [run(replica) for replica in self.replicas]

    def update(self, weights: Weights) -> None:
        """Serve other weights of the same shapes from the next round on, with no page of what the old ones read."""
        with self._standing_still():
            for replica in self.replicas:
                replica.forget_prefixes()
                replica.device.weights = put_like(weights, replica.device.weights)

    def let_go(self) -> list[Replica]:
        """Return the replicas, held here no more, so that their memory is free with the last round under way."""
        replicas, self.replicas, self._rounds = self.replicas, [], []
        return replicas

    @contextlib.contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Hold every replica between two rounds."""
        with contextlib.ExitStack() as held:
            for replica in self.replicas:
                held.enter_context(replica.lock)
            held.enter_context(self.queue.lock)
            yield

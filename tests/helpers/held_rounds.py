"""A replica whose rounds wait before they decode."""

import threading
from collections.abc import Callable

from et_jax.serve.replica import Replica


class HeldRounds:
    """Every round of a replica sets `inside`, lets go of the queue, and waits for `go_on` before it does `then`.

    Without `then` it decodes, as it does again after `end`.
    """

    def __init__(self, replica: Replica, then: Callable[[bool], None] | None = None) -> None:
        self.inside, self.go_on, self.replica = threading.Event(), threading.Event(), replica
        inside, go_on, queue, do = self.inside, self.go_on, replica.queue, then or replica._decode

        def held(pending: bool) -> None:
            inside.set()
            queue.lock.release()
            go_on.wait(20)
            queue.lock.acquire()
            do(pending)

        replica._decode = held  # type: ignore[method-assign]

    def end(self) -> None:
        """Let every round decode at once again."""
        self.go_on.set()
        del self.replica._decode

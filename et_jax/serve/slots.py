"""The slots of a replica: admits sequences to them, preempts sequences when pages run out, and ends them."""

import logging
import time

import numpy as np

from et_jax.decode.config import DecoderConfig
from et_jax.errors import UsageError
from et_jax.serve import scheduler
from et_jax.serve.completions import FinishReason, TokenEvent
from et_jax.serve.device import Device
from et_jax.serve.memory.page_pool import PagePool
from et_jax.serve.metrics import Metrics
from et_jax.serve.queue import Queue
from et_jax.serve.sequence import Sequence, Status

_LOG = logging.getLogger(__name__)


class Slots:
    """The `sequences` in the slots of a replica, by slot; their pages are in `pool`, their state on `device`.

    Sequences come from `queue`, and return to it if pages run out. The caller holds the queue's lock.
    """

    def __init__(self, config: DecoderConfig, device: Device, pool: PagePool, queue: Queue, metrics: Metrics) -> None:
        self.config, self.device, self.pool, self.queue, self.metrics = config, device, pool, queue, metrics
        self.sequences: dict[int, Sequence] = {}
        queue.join(self.sequences)

    @property
    def free(self) -> list[int]:
        """The slots without a sequence."""
        return [slot for slot in range(self.config.num_slots) if slot not in self.sequences]

    @property
    def abandoned(self) -> list[Sequence]:
        """The sequences, in the queue or in a slot here, that their callers have abandoned."""
        return [one for one in (*self.queue.waiting, *self.sequences.values()) if one.abandoned]

    def having(self, status: Status) -> dict[int, Sequence]:
        """Return the sequences in slots with a given status, by slot."""
        return {slot: sequence for slot, sequence in self.sequences.items() if sequence.status is status}

    def admit(self) -> None:
        """Admit waiting sequences as pages and slots permit, and swap in those that were swapped out."""
        free = self.free
        if not free or not self.queue.waiting:
            return
        chosen = self.queue.admit(len(self.sequences), len(free), self.pool)
        for slot, sequence in zip(free, chosen, strict=False):
            self.sequences[slot] = sequence
            sequence.slot = slot
            if sequence.status is Status.SWAPPED:
                self._swap_in(slot, sequence)
            else:
                self.pool.admit(slot, sequence.prompt_ids, sequence.most_written, sequence.adapter)

    def preempt_one(self, turn: int) -> None:
        """Preempt one of the running sequences; consecutive turns take them one after the other."""
        running = list(self.having(Status.RUNNING).values())
        if running:
            self.preempt(running[turn % len(running)])

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot away: it is swapped out or, if it was still prefilling, starts again."""
        assert sequence.slot is not None
        slot, running = sequence.slot, sequence.status is Status.RUNNING
        if running:
            copies = self.device.swap_out(slot, self.pool.num_allocated(slot))
            sequence.row, sequence.swapped = self.queue.fetched(copies)
        self._vacate(sequence)
        sequence.status = Status.SWAPPED if running else Status.WAITING
        self.queue.waiting.append(sequence)
        self.metrics.preemptions += 1

    def _swap_in(self, slot: int, sequence: Sequence) -> None:
        prompt, most, written = sequence.prompt_ids, sequence.most_written, sequence.num_written
        self.pool.swap_in(slot, prompt, most, written, sequence.adapter, ahead=sequence.is_ahead)
        self.device.evict(self.pool.settle())
        self.device.swap_in(slot, sequence.row, sequence.swapped)
        sequence.row, sequence.swapped = None, []
        sequence.status = Status.RUNNING

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            del self.sequences[sequence.slot]
            self.pool.release(sequence.slot)
            self.device.release(sequence.slot)
            sequence.slot = None

    def make_room(self, num_steps: int) -> int:
        """Return for how many steps there are pages, at least 1, preempting as few sequences as necessary."""
        num_steps = self.pool.affordable(num_steps)
        while (short := self.pool.shortage(num_steps)) > 0:
            scored = self.queue.fetched(self.device.state.control.priority)
            running = self.having(Status.RUNNING)
            priority = {slot: float(scored[slot]) if slot in running else -np.inf for slot in self.sequences}
            chosen = scheduler.preempted(list(self.sequences.values()), self.pool, priority, short)
            if not chosen:
                raise RuntimeError(f"a single sequence lacks {short} pages, which its admission had reserved")
            for sequence in chosen:
                self.preempt(sequence)
        self.device.evict(self.pool.settle(self.pool.growth(num_steps)))
        return num_steps

    def end_abandoned(self) -> None:
        """End the sequences, here or in the queue, that their callers have abandoned, as "abort"."""
        for sequence in self.abandoned:
            if sequence.slot is None:
                self.queue.waiting.remove(sequence)
            self.stop(sequence, "abort")

    def end(self, sequence: Sequence, event: TokenEvent) -> None:
        """Empty the slot of a sequence, if it has one, and deliver its last event."""
        self._vacate(sequence)
        sequence.row, sequence.swapped = None, []
        if event.completion is not None:
            self.metrics.add_completion(event.completion)
            if sequence.admitted is not None:
                self.metrics.waiting_seconds += sequence.admitted - sequence.arrived
                self.metrics.serving_seconds += time.monotonic() - sequence.admitted
        self.deliver(sequence, event)

    def stop(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence with its tokens so far, and with its withheld text unless its tokenizer fails."""
        try:
            event = sequence.end(reason, error=error)
        except Exception as failure:
            event = sequence.fail(error or _sentence(failure))
        self.end(sequence, event)

    def fail(self, sequence: Sequence, failure: Exception) -> None:
        """End a sequence after an error on the host; the others continue."""
        self.end(sequence, sequence.fail(_sentence(failure)))

    def deliver(self, sequence: Sequence, event: TokenEvent) -> None:
        """Pass an event to the caller; a sequence whose event cannot be delivered ends."""
        try:
            sequence.deliver(event)
        except Exception as failure:
            if event.completion is None:
                return self.fail(sequence, failure)
            _LOG.exception("The last event of a sequence could not be delivered; its caller does not receive it.")
        return None


def _sentence(failure: Exception) -> str:
    """Return the error message of a sequence that failed on the host."""
    if isinstance(failure, UsageError):
        return str(failure)
    return f"Serving this request failed ({type(failure).__name__}: {str(failure)[:200]}); the others go on."

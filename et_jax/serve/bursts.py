"""Decodes the sequences in the slots of a replica by bursts of steps, the next of which may run ahead of the host."""

import dataclasses
import time

import jax
import numpy as np

from et_jax.decode import faults
from et_jax.decode.config import Variant
from et_jax.decode.output import unpacked_steps
from et_jax.decode.packed import Packed
from et_jax.decode.plant import costs
from et_jax.decode.sampling.steering import MOST_FORCED
from et_jax.serve.clocks.step_clock import StepClock
from et_jax.serve.records import Burst, StepRow
from et_jax.serve.sequence import Sequence, Status
from et_jax.serve.slots import Slots
from et_jax.text.grammar import Bits

_BURST_SECONDS = 0.05
_CONSTRAINED_SHARE = 0.8  # of a burst, if sequences with a grammar run: they get one unforced token per burst


@dataclasses.dataclass(frozen=True, kw_only=True)
class InFlight:
    """A burst in flight, of at most `steps` steps for `running` sequences; the host fetches outputs and promises."""

    steps: int
    running: int
    variant: Variant
    began: float
    outputs: Packed
    promises: list[jax.Array]


class Bursts:
    """The bursts of a replica: at most one whose tokens are not delivered yet, between two rounds.

    A burst decodes all running sequences for about `burst_seconds`; if that is 0, a burst is one step, and none starts
    before the last one is finished. The caller holds the queue's lock, except while `finish` waits for the device.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots, self._config, self._device, self._pool = slots, slots.config, slots.device, slots.pool
        self._queue, self._metrics = slots.queue, slots.metrics
        self._costs = costs(
            self._config.plants, self._device.weights, self._device.state.plants, self._config.by_mass_of
        )
        self._clock = StepClock(self._config)
        if (laws := self._clock.begin()) is not None:
            self._device.set_draft_laws(laws)
        self.burst_seconds = _BURST_SECONDS
        self._steps, self._fetched = 1, 0.0  # of a burst; when the last one was fetched
        self._in_flight: InFlight | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a burst was started and not finished."""
        return self._in_flight is not None

    def start(self, pending: bool) -> None:
        """Start a burst: a single step while prompts are `pending`, else as many as fit into `burst_seconds`."""
        ahead = self._constrain()
        if not self._slots.having(Status.RUNNING):
            return
        if any(sequence.deadline is not None for sequence in self._slots.sequences.values()):
            self._device.set_urgency({slot: sequence.urgency for slot, sequence in self._slots.sequences.items()})
        most = self._pool.steps_to_point
        steps = 1 if pending else self._steps_beside(ahead)
        self._in_flight = self._dispatch(self._slots.make_room(steps if most is None else min(steps, most)))

    def finish(self, *, may_run_ahead: bool) -> None:
        """Wait for the burst in flight, and deliver its tokens.

        If `may_run_ahead`, and the host has nothing to decide before it, the next burst is started first: the device
        runs it while the host delivers.
        """
        burst = self._in_flight
        assert burst is not None
        self._in_flight = self._next(burst) if may_run_ahead else None
        self._finish(burst)

    def _next(self, burst: InFlight) -> InFlight | None:
        """Start the burst after `burst`, whose results are not known yet; None if the host may first have to act.

        A new sequence waits for both.
        """
        steps = burst.steps + self._steps
        most = self._pool.steps_to_point
        fits = self._pool.shortage(steps) <= 0 and (most is None or steps <= most)
        if not (fits and self._is_steady(burst.steps)):
            return None
        self._device.evict(self._pool.settle(self._pool.growth(steps)))
        return self._dispatch(steps - burst.steps)

    def _is_steady(self, steps: int) -> bool:
        """Return whether the host has nothing to decide after the next `steps` steps.

        Between bursts it admits sequences, and sets draft laws, the tokens of a grammar, and urgency under a deadline.
        """
        sequences = self._slots.sequences.values()
        return (
            self.burst_seconds > 0
            and self._config.draft is None
            and all(one.status is Status.RUNNING for one in sequences)
            and all(one.matcher is None and one.deadline is None for one in sequences)
            and any(one.limit - len(one.trace) > steps for one in sequences)
            and not (self._queue.waiting and self._slots.free)
        )

    def _dispatch(self, steps: int) -> InFlight:
        """Start a burst of all running sequences, for which there are pages."""
        running = self._slots.having(Status.RUNNING)
        may_choose = any(self._config.may_choose(sequence.laws) for sequence in running.values())
        began, promises, self._device.promises = time.perf_counter(), self._device.promises, []
        outputs, variant = self._device.decode(
            steps, len(running), may_choose=may_choose, until_end=bool(self._queue.waiting)
        )
        return InFlight(
            steps=steps, running=len(running), variant=variant, began=began, outputs=outputs, promises=promises
        )

    def _finish(self, burst: InFlight) -> None:
        """Wait for a burst, and deliver its tokens."""
        outputs, granted = self._queue.fetched((burst.outputs, burst.promises))
        output, ran = unpacked_steps(outputs)
        ran = int(ran)
        if not all(map(np.all, granted)) or output.refused[:ran].any():
            raise RuntimeError("a sequence did not get the pages that were reserved for it")
        now = time.perf_counter()
        seconds, self._fetched = now - max(burst.began, self._fetched), now
        self._device.record(burst.running, burst.variant, seconds)
        if ran and not granted:  # with promises, `seconds` includes a prefill
            self._steps = int(np.clip(self.burst_seconds * max(ran, 1) / seconds, 1, self._config.max_steps))
            compiling = self._device.making  # a concurrent compilation slows the steps
            laws = None if compiling else self._clock.record(output, ran, seconds, burst.variant)
            if laws is not None:
                self._device.set_draft_laws(laws)
        self._metrics.steps += ran
        self._deliver(Burst(self._costs, output, ran), ran, burst.variant.rows)
        self._compress()

    def _deliver(self, burst: Burst, ran: int, num_rows: int) -> None:
        """Deliver the tokens of a burst of `ran` steps with `num_rows` rows."""
        for step in range(ran):
            num_sharing = burst.num_sharing(step, self._slots.having(Status.RUNNING))
            for position in range(burst.num_positions(step)):
                now = self._slots.having(Status.RUNNING)
                if position == 0:
                    num_served = burst.num_served(step, now)
                    self._metrics.add_rows(num_rows, num_served, burst.idle(step, num_rows - num_served))
                for slot, sequence in now.items():
                    asked = sequence.request.params.logprobs
                    row = burst.row(step, position, slot, asked, num_sharing, sequence.unpaid)
                    sequence.unpaid = row.unpaid
                    self._take(slot, sequence, row)

    def _steps_beside(self, ahead: dict[int, tuple[list[int], Bits]]) -> int:
        """Return the steps of a burst in which sequences with a grammar have forced tokens `ahead`.

        If all have a grammar, it is the number with the most tokens per time, at an overhead of a step per burst.
        """
        if len(ahead) < len(self._slots.having(Status.RUNNING)):
            return max(1, round(self._steps * _CONSTRAINED_SHARE)) if ahead else self._steps
        lengths = [-(-(1 + len(forced)) // self._config.most_per_step) for forced, _ in ahead.values()]
        return max(range(1, 1 + max(lengths)), key=lambda n: sum(min(n, length) for length in lengths) / (n + 1))

    def _constrain(self) -> dict[int, tuple[list[int], Bits]]:
        """Send the device the tokens that sequences with a grammar may sample next, and return them."""
        ahead = {}
        for slot, sequence in self._slots.having(Status.RUNNING).items():
            if sequence.matcher is not None:
                try:
                    ahead[slot] = sequence.matcher.ahead(MOST_FORCED)
                except Exception as failure:
                    self._slots.fail(sequence, failure)
        if ahead:
            self._device.constrain(ahead)
        return ahead

    def _compress(self) -> None:
        """Compress the sequences that are due; `Slots.make_room` has reserved the pages for that."""
        for slot in self._pool.due:
            self._pool.compress(slot)
            self._device.evict(self._pool.settle())
            self._device.compress(slot)
            self._slots.sequences[slot].left_out = self._pool.left_out(slot)

    def _take(self, slot: int, sequence: Sequence, row: StepRow) -> None:
        """Add a step's token to a sequence, and deliver the event."""
        if row.fault:
            return self._slots.stop(sequence, "error", faults.sentence(row.fault, len(sequence.trace)))
        if row.trace is None:
            return self._pool.put_ahead(slot) if sequence.is_ahead else None
        self._metrics.add_token(row.trace)
        self._pool.write(slot)
        try:
            event = sequence.take(row.trace, row.finished)
        except Exception as failure:
            return self._slots.fail(sequence, failure)
        return self._slots.end(sequence, event) if event.completion else self._slots.deliver(sequence, event)

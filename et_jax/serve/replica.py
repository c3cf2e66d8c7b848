"""A replica: admits sequences to slots, prefills, decodes in bursts, and preempts sequences when pages run out."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from et_jax.decode import faults
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder
from et_jax.decode.plant import Weights, costs
from et_jax.decode.sampling.steering import MOST_FORCED
from et_jax.errors import UsageError
from et_jax.scope import own_settings
from et_jax.serve import chunks, scheduler
from et_jax.serve.clocks.step_clock import StepClock
from et_jax.serve.completions import FinishReason, TokenEvent
from et_jax.serve.config import EngineConfig
from et_jax.serve.device import Device
from et_jax.serve.memory.page_pool import Compressing, PagePool
from et_jax.serve.metrics import Metrics
from et_jax.serve.programs.compilation import made
from et_jax.serve.queue import Queue
from et_jax.serve.records import Burst, StepRow, prompt_read
from et_jax.serve.sequence import Sequence, Status
from et_jax.text.grammar import Bits
from et_jax.types import replace

_BURST_SECONDS = 0.05
_CONSTRAINED_SHARE = 0.8  # of a burst, if sequences with a grammar run: they get one unforced token per burst
_LOG = logging.getLogger(__name__)


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Use the package's settings of JAX and no default device: a replica's arrays are on the device of its weights."""
    with own_settings(), jax.default_device(None):
        yield


class Replica:
    """The decode state of one decoder, and the sequences in its slots.

    Every round prefills at most `max_num_batched_tokens` tokens of `settings`, the rows of a step included, and decodes
    for about `burst_seconds`. With `keep_prefixes` full pages of prompts are cached and shared. Every `preempt_every`
    rounds (0: never) a sequence is preempted without need, to test that its tokens do not change.

    Sequences come from `queue`, and return to it if pages run out. A round owns the queue's lock except while it waits
    for the device, and the replica's own `lock` throughout, because the state is donated. A host error of a sequence
    (in its tokenizer, its settings or its `deliver`) ends only that sequence. Any other exception in a round loses the
    state and makes the replica `broken`. `under_way` is True from the request for a round until its end.
    """

    @placed()
    def __init__(
        self,
        weights: Weights,
        decoder: Decoder,
        queue: Queue,
        settings: EngineConfig,
        *,
        metrics: Metrics,
        keep_prefixes: bool = True,
    ) -> None:
        self.config, self.queue, self.metrics = decoder.config, queue, metrics
        self.device = Device(weights, decoder)
        self._most_per_step = 1 if self.config.draft is None else 1 + self.config.draft.most
        self.pool = PagePool(
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            chunk=self.config.chunk,
            keep_prefixes=keep_prefixes,
            most_per_step=self._most_per_step,
            compressing=_compressing(self.config),
        )
        self.slots: dict[int, Sequence] = {}
        self.lock, self.broken, self.under_way = threading.Lock(), False, False
        self.burst_seconds = _BURST_SECONDS
        self._keeps_prefixes, self._preempt_every = keep_prefixes, settings.preempt_every
        self._batched_tokens = settings.max_num_batched_tokens
        self._costs = costs(self.config.plants, weights, self.device.state.plants, self.config.by_mass_of)
        self._clock = StepClock(self.config)
        if (laws := self._clock.begin()) is not None:
            self.device.set_draft_laws(laws)
        self._rounds = 0
        self._steps = 1
        queue.join(self.slots)

    # Rounds.

    @placed()
    def warm_up(self, tell: Callable[[str], None], drafts: bool) -> None:
        """Compile every program; without `drafts` the drafting program is compiled in the background."""
        before = made()
        short = self.config.num_pages - 1 < self.config.num_slots * self.config.blocks_per_slot
        self.device.warm_up(tell, shares=self._keeps_prefixes, swaps=short or self._preempt_every > 0, drafts=drafts)
        ready = made() - before
        self.metrics.add_programs(ready)
        tell(str(ready))

    @placed()
    def advance(self) -> None:
        """Run a round: admit sequences as pages and slots permit, prefill, decode a burst, deliver the events."""
        try:
            with self.lock, self.queue.lock:
                self._advance()
        finally:
            self.under_way = False

    def _advance(self) -> None:
        before, making = made(), self.device.making
        try:
            self._round()
        except BaseException:
            self.broken = True
            raise
        late = made() - before
        self.metrics.add_programs(late)
        if not (making or self.device.making):  # else a background compilation may be counted
            self.metrics.programs_compiled_late += late.programs

    def _round(self) -> None:
        self._rounds += 1
        self.end_abandoned()
        if self._preempt_every and self._rounds % self._preempt_every == 0:
            self._preempt_one()
        self._admit()
        pending = self._prefill()
        self._decode(pending)

    @property
    def idle(self) -> bool:
        """Whether no sequence is in the queue or in a slot."""
        return not self.queue.waiting and not self.slots

    @property
    def free_slot(self) -> int | None:
        """The first slot without a sequence, or None."""
        return next((slot for slot in range(self.config.num_slots) if slot not in self.slots), None)

    @property
    def abandoned(self) -> list[Sequence]:
        """The sequences, in the queue or in a slot here, that their callers have abandoned."""
        return [one for one in (*self.queue.waiting, *self.slots.values()) if one.abandoned]

    @placed()
    def end_abandoned(self) -> None:
        """End the abandoned sequences with their tokens so far, as "abort"."""
        for sequence in self.abandoned:
            if sequence.slot is None:
                self.queue.waiting.remove(sequence)
            self._end(sequence, self._last(sequence, "abort"))

    @placed()
    def forget_prefixes(self) -> None:
        """Evict every cached prefix page that no sequence uses."""
        self.end_abandoned()
        self.device.evict(self.pool.forget())

    def _with(self, status: Status) -> dict[int, Sequence]:
        """Return the sequences in slots with a given status, by slot."""
        return {slot: sequence for slot, sequence in self.slots.items() if sequence.status is status}

    # Slots.

    def _admit(self) -> None:
        free = [slot for slot in range(self.config.num_slots) if slot not in self.slots]
        if not free or not self.queue.waiting:
            return
        chosen = self.queue.admit(len(self.slots), len(free), self.pool)
        for slot, sequence in zip(free, chosen, strict=False):
            self.slots[slot] = sequence
            sequence.slot = slot
            if sequence.status is Status.SWAPPED:
                self._swap_in(slot, sequence)
            else:
                self.pool.admit(slot, sequence.prompt_ids, sequence.most_written, sequence.adapter)

    def _preempt_one(self) -> None:
        running = list(self._with(Status.RUNNING).values())
        if running:
            self._preempt(running[self._rounds // self._preempt_every % len(running)])

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot away: it is swapped out or, if it was still prefilling, starts again."""
        assert sequence.slot is not None
        slot, running = sequence.slot, sequence.status is Status.RUNNING
        if running:
            copies = self.device.swap_out(slot, self.pool.num_held(slot))
            sequence.row, sequence.swapped = self._fetched(copies)
        self._vacate(sequence)
        sequence.status = Status.SWAPPED if running else Status.WAITING
        self.queue.waiting.append(sequence)
        self.metrics.preemptions += 1

    def _swap_in(self, slot: int, sequence: Sequence) -> None:
        self.pool.swap_in(slot, sequence.prompt_ids, sequence.most_written, sequence.num_written, sequence.adapter)
        self.device.evict(self.pool.settle())
        self.device.swap_in(slot, sequence.row, sequence.swapped)
        sequence.row, sequence.swapped = None, []
        sequence.status = Status.RUNNING

    def _vacate(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            del self.slots[sequence.slot]
            self.pool.release(sequence.slot)
            self.device.release(sequence.slot)
            sequence.slot = None

    def _make_room(self, num_steps: int) -> int:
        """Return for how many steps there are pages, at least 1, preempting as few sequences as necessary."""
        num_steps = self.pool.affordable(num_steps)
        while (short := self.pool.shortage(num_steps)) > 0:
            scored = self._fetched(self.device.state.control.priority)
            running = self._with(Status.RUNNING)
            priority = {slot: float(scored[slot]) if slot in running else -np.inf for slot in self.slots}
            chosen = scheduler.preempted(list(self.slots.values()), self.pool, priority, short)
            if not chosen:
                raise RuntimeError(f"one sequence alone lacks {short} pages, which its admission had counted on")
            for sequence in chosen:
                self._preempt(sequence)
        self.device.evict(self.pool.settle(self.pool.growth(num_steps)))
        return num_steps

    # Ends.

    def _end(self, sequence: Sequence, event: TokenEvent) -> None:
        """Empty the slot of a sequence, if it has one, and deliver its last event."""
        self._vacate(sequence)
        sequence.row, sequence.swapped = None, []
        if event.completion is not None:
            self.metrics.add_completion(event.completion)
            if sequence.admitted is not None:
                self.metrics.waiting_seconds += sequence.admitted - sequence.arrived
                self.metrics.serving_seconds += time.monotonic() - sequence.admitted
        self._deliver(sequence, event)

    def _last(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """Return the last event of a sequence, with its withheld text unless its tokenizer fails."""
        try:
            return sequence.end(reason, error=error)
        except Exception as failure:
            return sequence.fail(error or _sentence(failure))

    def _fail(self, sequence: Sequence, failure: Exception) -> None:
        """End a sequence after an error on the host; the others continue."""
        self._end(sequence, sequence.fail(_sentence(failure)))

    def _deliver(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.deliver(event)
        except Exception as failure:
            if event.completion is None:
                return self._fail(sequence, failure)
            _LOG.exception("The end of a sequence could not be delivered; its caller does not hear of it.")
        return None

    # Prompts.

    def _prefill(self) -> bool:
        """Prefill within the round's budget; return whether prompts remain for the next round."""
        budget = max(1, (self._batched_tokens - len(self._with(Status.RUNNING))) // self.config.prefill_batch)
        while True:
            self._insert_whole()
            for slot, sequence in self._with(Status.WAITING).items():
                self._begin(slot, sequence)
            self._insert_whole()  # sequences whose prompts are entirely in the prefix cache
            chosen = self._choose_chunks()
            if not chosen or not budget:
                return len(self._with(Status.RUNNING)) < len(self.slots)
            self._prefill_chunks(chosen)
            budget -= 1

    def _choose_chunks(self) -> list[tuple[int, list[int]]]:
        """Return the slots and chunks for the next call, from prompts that have begun, in order of admission."""
        begun = sorted(self._with(Status.PREFILLING).items(), key=lambda pair: pair[1].turn)
        left = ((slot, sequence.prompt_ids[self.pool.written(slot) : -1]) for slot, sequence in begun)
        return chunks.next_call(self.config, left)

    def _prefill_chunks(self, chosen: list[tuple[int, list[int]]]) -> None:
        """Prefill chunks of prompts in one call."""
        for slot, tokens in chosen:
            self.pool.write(slot, len(tokens))
        self.device.evict(self.pool.settle())
        ends = {slot for slot, _ in chosen if self._is_whole(slot)}
        self.device.prefill(chosen, ends)

    def _begin(self, slot: int, sequence: Sequence) -> None:
        """Share the cached pages of a sequence's prompt, unless another slot is just filling more of them."""
        try:
            shared = self.pool.begin(slot)
        except Exception as failure:
            return self._fail(sequence, failure)
        if shared is None:
            return None
        sequence.status = Status.PREFILLING
        if self.config.num_adapters:
            self.device.set_adapters({slot: one.adapter for slot, one in self.slots.items()})
        self.metrics.prompt_tokens += len(sequence.prompt_ids)
        if shared:
            self.device.share(slot, shared)
            self.metrics.cached_prompt_tokens += self.pool.written(slot)
        return None

    def _insert_whole(self) -> None:
        """Insert the sequences whose full prompts are in the cache."""
        prefilling = self._with(Status.PREFILLING).items()
        whole = [(slot, one) for slot, one in prefilling if self._is_whole(slot)]
        if whole and self.config.controller.budget is not None:
            notes = self._fetched(self.device.state.control.prompt)
            for slot, sequence in whole:
                sequence.prompt_read = prompt_read(notes, slot)
        for slot, sequence in whole:
            self._insert(slot, sequence)
        if whole and self._keeps_prefixes:
            table = self._fetched(self.device.state.table.pages)
            for slot, sequence in whole:
                if sequence.status is Status.RUNNING:
                    self.device.keep(self.pool.keep(slot, table[slot].tolist()))

    def _is_whole(self, slot: int) -> bool:
        """Return whether the prompt of a slot's sequence is in the cache, except for its last token."""
        return self.pool.written(slot) == len(self.slots[slot].prompt_ids) - 1

    def _insert(self, slot: int, sequence: Sequence) -> None:
        """Start decoding a sequence whose prompt is in the cache."""
        try:
            asked = sequence.asked(self.config)
        except Exception as failure:
            return self._fail(sequence, failure)
        self.device.insert(slot, asked)
        self.pool.run(slot)
        sequence.status = Status.RUNNING
        return None

    # Tokens.

    def _decode(self, pending: bool) -> None:
        """Run a burst: a single step while prompts are `pending`, else as many as fit into `burst_seconds`."""
        ahead = self._constrain()
        if not self._with(Status.RUNNING):
            return
        if any(sequence.deadline is not None for sequence in self.slots.values()):
            self.device.set_urgency({slot: sequence.urgency for slot, sequence in self.slots.items()})
        most = self.pool.steps_to_point
        steps = 1 if pending else self._steps_beside(ahead)
        steps = self._make_room(steps if most is None else min(steps, most))
        promises, self.device.promises = self.device.promises, []
        running = self._with(Status.RUNNING).values()
        may_choose = any(self.config.may_choose(sequence.laws) for sequence in running)
        began, waiting = time.perf_counter(), bool(self.queue.waiting)
        outputs, ran, variant = self.device.decode(steps, len(running), may_choose=may_choose, until_end=waiting)
        asked = {slot: sequence.request.params.logprobs for slot, sequence in self.slots.items()}
        if not any(asked.values()):
            outputs = replace(outputs, top_tokens=None, top_logprobs=None)
        output, ran, granted = self._fetched((outputs, ran, promises))
        ran = int(ran)
        if not all(map(np.all, granted)) or output.refused[:ran].any():
            raise RuntimeError("a sequence was promised pages and did not get them")
        seconds = time.perf_counter() - began
        self.device.note(len(running), variant, seconds)
        if not promises:  # with promises, `seconds` includes a prefill
            self._steps = int(np.clip(self.burst_seconds * max(ran, 1) / seconds, 1, self.config.max_steps))
            compiling = self.device.making  # a concurrent compilation slows the steps
            laws = None if compiling else self._clock.note(output, ran, seconds, variant)
            if laws is not None:
                self.device.set_draft_laws(laws)
        self.metrics.steps += ran
        burst = Burst(self._costs, output, ran)
        for step in range(ran):
            num_sharing = burst.num_sharing(step, self._with(Status.RUNNING))
            for position in range(burst.num_positions(step)):
                now = self._with(Status.RUNNING)
                if position == 0:
                    num_served = burst.num_served(step, now)
                    self.metrics.add_rows(variant.rows, num_served, burst.idle(step, variant.rows - num_served))
                for slot, sequence in now.items():
                    row = burst.row(step, position, slot, asked[slot], num_sharing, sequence.unpaid)
                    sequence.unpaid = row.unpaid
                    self._take(slot, sequence, row)
        self._compress()

    def _steps_beside(self, ahead: dict[int, tuple[list[int], Bits]]) -> int:
        """Return the steps of a burst in which sequences with a grammar have forced tokens `ahead`.

        If all have a grammar, it is the number with the most tokens per time, at an overhead of a step per burst.
        """
        if len(ahead) < len(self._with(Status.RUNNING)):
            return max(1, round(self._steps * _CONSTRAINED_SHARE)) if ahead else self._steps
        lengths = [-(-(1 + len(forced)) // self._most_per_step) for forced, _ in ahead.values()]
        return max(range(1, 1 + max(lengths)), key=lambda n: sum(min(n, length) for length in lengths) / (n + 1))

    def _constrain(self) -> dict[int, tuple[list[int], Bits]]:
        """Send the device the tokens that sequences with a grammar may sample next, and return them."""
        ahead = {}
        for slot, sequence in self._with(Status.RUNNING).items():
            if sequence.matcher is not None:
                try:
                    ahead[slot] = sequence.matcher.ahead(MOST_FORCED)
                except Exception as failure:
                    self._fail(sequence, failure)
        if ahead:
            self.device.constrain(ahead)
        return ahead

    def _compress(self) -> None:
        """Compress the sequences that are due; `_make_room` has reserved the pages for that."""
        for slot in self.pool.due:
            self.pool.compress(slot)
            self.device.evict(self.pool.settle())
            self.device.compress(slot)
            self.slots[slot].left_out = self.pool.left_out(slot)

    def _take(self, slot: int, sequence: Sequence, row: StepRow) -> None:
        """Add a step's token to a sequence, and deliver the event."""
        if row.fault:
            return self._end(sequence, self._last(sequence, "error", faults.sentence(row.fault, len(sequence.trace))))
        if row.trace is None:
            return None
        self.metrics.add_token(row.trace)
        self.pool.write(slot)
        try:
            event = sequence.take(row.trace, row.finished)
        except Exception as failure:
            return self._fail(sequence, failure)
        return self._end(sequence, event) if event.completion else self._deliver(sequence, event)

    def _fetched(self, tree: Any) -> Any:
        """Return arrays of the device as numpy arrays; other replicas can run while this one waits for them."""
        self.queue.lock.release()
        try:
            return jax.device_get(tree)
        finally:
            self.queue.lock.acquire()


def _compressing(config: DecoderConfig) -> Compressing | None:
    """Return the compression settings that the pool requires, or None."""
    how, layout = config.compression, config.layout
    if how is None or layout is None:
        return None
    room = layout.region * config.page_size
    return Compressing(room=room, point=partial(how.point, region=room), fresh_tokens=how.fresh_tokens)


def _sentence(failure: Exception) -> str:
    """Return the error message of a sequence that failed on the host."""
    if isinstance(failure, UsageError):
        return str(failure)
    return f"Serving this request failed ({type(failure).__name__}: {str(failure)[:200]}); the others go on."

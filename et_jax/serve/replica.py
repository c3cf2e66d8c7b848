"""A replica: its rounds admit sequences to slots, prefill their prompts, and decode a burst of steps."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import jax
import numpy as np

from et_jax.decode import faults
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder
from et_jax.decode.plant import Weights, costs
from et_jax.decode.sampling.steering import MOST_FORCED
from et_jax.scope import own_settings
from et_jax.serve import chunks
from et_jax.serve.clocks.step_clock import StepClock
from et_jax.serve.config import EngineConfig
from et_jax.serve.device import Device
from et_jax.serve.memory.page_pool import Compressing, PagePool
from et_jax.serve.metrics import Metrics
from et_jax.serve.programs.compilation import made
from et_jax.serve.queue import Queue
from et_jax.serve.records import Burst, StepRow, prompt_read
from et_jax.serve.sequence import Sequence, Status
from et_jax.serve.slots import Slots
from et_jax.text.grammar import Bits
from et_jax.types import replace

_BURST_SECONDS = 0.05
_CONSTRAINED_SHARE = 0.8  # of a burst, if sequences with a grammar run: they get one unforced token per burst


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Use the package's settings of JAX and no default device: a replica's arrays are on the device of its weights."""
    with own_settings(), jax.default_device(None):
        yield


class Replica:
    """The decode state of one decoder, and the sequences in its slots.

    Every round prefills at most `max_num_batched_tokens` tokens of `settings`, the rows of a step included, and decodes
    for about `burst_seconds`. With `cache_prefixes` full pages of prompts are cached and shared. Every `preempt_every`
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
        cache_prefixes: bool = True,
    ) -> None:
        self.config, self.queue, self.metrics = decoder.config, queue, metrics
        self.device = Device(weights, decoder)
        self._most_per_step = 1 if self.config.draft is None else 1 + self.config.draft.most
        self.pool = PagePool(
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            chunk=self.config.chunk,
            cache_prefixes=cache_prefixes,
            most_per_step=self._most_per_step,
            compressing=_compressing(self.config),
        )
        self.lock, self.broken, self.under_way = threading.Lock(), False, False
        self.burst_seconds = _BURST_SECONDS
        self._caches_prefixes, self._preempt_every = cache_prefixes, settings.preempt_every
        self._batched_tokens = settings.max_num_batched_tokens
        self._costs = costs(self.config.plants, weights, self.device.state.plants, self.config.by_mass_of)
        self._clock = StepClock(self.config)
        if (laws := self._clock.begin()) is not None:
            self.device.set_draft_laws(laws)
        self._rounds = 0
        self._steps = 1
        self.slots = Slots(self.config, self.device, self.pool, queue, metrics)

    # Rounds.

    @placed()
    def warm_up(self, report: Callable[[str], None], drafts: bool) -> None:
        """Compile every program; without `drafts` the drafting program is compiled in the background."""
        before = made()
        short = self.config.num_pages - 1 < self.config.num_slots * self.config.blocks_per_slot
        self.device.warm_up(report, shares=self._caches_prefixes, swaps=short or self._preempt_every > 0, drafts=drafts)
        ready = made() - before
        self.metrics.add_programs(ready)
        report(str(ready))

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
            self.slots.preempt_one(self._rounds // self._preempt_every)
        self.slots.admit()
        pending = self._prefill()
        self._decode(pending)

    @property
    def idle(self) -> bool:
        """Whether no sequence is in the queue or in a slot."""
        return not self.queue.waiting and not self.slots.sequences

    @placed()
    def end_abandoned(self) -> None:
        """End the sequences that their callers have abandoned with their tokens so far, as "abort"."""
        self.slots.end_abandoned()

    @placed()
    def forget_prefixes(self) -> None:
        """Evict every cached prefix page that no sequence uses."""
        self.end_abandoned()
        self.device.evict(self.pool.forget())

    # Prompts.

    def _prefill(self) -> bool:
        """Prefill within the round's budget; return whether prompts remain for the next round."""
        budget = max(1, (self._batched_tokens - len(self.slots.having(Status.RUNNING))) // self.config.prefill_batch)
        while True:
            self._insert_complete()
            for slot, sequence in self.slots.having(Status.WAITING).items():
                self._begin(slot, sequence)
            self._insert_complete()  # sequences whose prompts are entirely in the prefix cache
            chosen = self._choose_chunks()
            if not chosen or not budget:
                return len(self.slots.having(Status.RUNNING)) < len(self.slots.sequences)
            self._prefill_chunks(chosen)
            budget -= 1

    def _choose_chunks(self) -> list[tuple[int, list[int]]]:
        """Return the slots and chunks for the next call, from prompts that have begun, in order of admission."""
        begun = sorted(self.slots.having(Status.PREFILLING).items(), key=lambda pair: pair[1].turn)
        left = ((slot, sequence.prompt_ids[self.pool.written(slot) : -1]) for slot, sequence in begun)
        return chunks.next_call(self.config, left)

    def _prefill_chunks(self, chosen: list[tuple[int, list[int]]]) -> None:
        """Prefill chunks of prompts in one call."""
        for slot, tokens in chosen:
            self.pool.write(slot, len(tokens))
        self.device.evict(self.pool.settle())
        ends = {slot for slot, _ in chosen if self._is_complete(slot)}
        self.device.prefill(chosen, ends)

    def _begin(self, slot: int, sequence: Sequence) -> None:
        """Share the cached pages of a sequence's prompt, unless another slot is just filling more of them."""
        try:
            shared = self.pool.begin(slot)
        except Exception as failure:
            return self.slots.fail(sequence, failure)
        if shared is None:
            return None
        sequence.status = Status.PREFILLING
        if self.config.num_adapters:
            self.device.set_adapters({slot: one.adapter for slot, one in self.slots.sequences.items()})
        self.metrics.prompt_tokens += len(sequence.prompt_ids)
        if shared:
            self.device.share(slot, shared)
            self.metrics.cached_prompt_tokens += self.pool.written(slot)
        return None

    def _insert_complete(self) -> None:
        """Insert the sequences whose full prompts are in the cache."""
        prefilling = self.slots.having(Status.PREFILLING).items()
        complete = [(slot, one) for slot, one in prefilling if self._is_complete(slot)]
        if complete and self.config.controller.budget is not None:
            records = self.queue.fetched(self.device.state.control.prompt)
            for slot, sequence in complete:
                sequence.prompt_read = prompt_read(records, slot)
        for slot, sequence in complete:
            self._insert(slot, sequence)
        if complete and self._caches_prefixes:
            table = self.queue.fetched(self.device.state.table.pages)
            for slot, sequence in complete:
                if sequence.status is Status.RUNNING:
                    self.device.reference(self.pool.cache(slot, table[slot].tolist()))

    def _is_complete(self, slot: int) -> bool:
        """Return whether the prompt of a slot's sequence is in the cache, except for its last token."""
        return self.pool.written(slot) == len(self.slots.sequences[slot].prompt_ids) - 1

    def _insert(self, slot: int, sequence: Sequence) -> None:
        """Start decoding a sequence whose prompt is in the cache."""
        try:
            asked = sequence.asked(self.config)
        except Exception as failure:
            return self.slots.fail(sequence, failure)
        self.device.insert(slot, asked)
        self.pool.run(slot)
        sequence.status = Status.RUNNING
        return None

    # Tokens.

    def _decode(self, pending: bool) -> None:
        """Run a burst: a single step while prompts are `pending`, else as many as fit into `burst_seconds`."""
        ahead = self._constrain()
        if not self.slots.having(Status.RUNNING):
            return
        if any(sequence.deadline is not None for sequence in self.slots.sequences.values()):
            self.device.set_urgency({slot: sequence.urgency for slot, sequence in self.slots.sequences.items()})
        most = self.pool.steps_to_point
        steps = 1 if pending else self._steps_beside(ahead)
        steps = self.slots.make_room(steps if most is None else min(steps, most))
        promises, self.device.promises = self.device.promises, []
        running = self.slots.having(Status.RUNNING).values()
        may_choose = any(self.config.may_choose(sequence.laws) for sequence in running)
        began, waiting = time.perf_counter(), bool(self.queue.waiting)
        outputs, ran, variant = self.device.decode(steps, len(running), may_choose=may_choose, until_end=waiting)
        asked = {slot: sequence.request.params.logprobs for slot, sequence in self.slots.sequences.items()}
        if not any(asked.values()):
            outputs = replace(outputs, top_tokens=None, top_logprobs=None)
        output, ran, granted = self.queue.fetched((outputs, ran, promises))
        ran = int(ran)
        if not all(map(np.all, granted)) or output.refused[:ran].any():
            raise RuntimeError("a sequence did not get the pages that were reserved for it")
        seconds = time.perf_counter() - began
        self.device.record(len(running), variant, seconds)
        if not promises:  # with promises, `seconds` includes a prefill
            self._steps = int(np.clip(self.burst_seconds * max(ran, 1) / seconds, 1, self.config.max_steps))
            compiling = self.device.making  # a concurrent compilation slows the steps
            laws = None if compiling else self._clock.record(output, ran, seconds, variant)
            if laws is not None:
                self.device.set_draft_laws(laws)
        self.metrics.steps += ran
        burst = Burst(self._costs, output, ran)
        for step in range(ran):
            num_sharing = burst.num_sharing(step, self.slots.having(Status.RUNNING))
            for position in range(burst.num_positions(step)):
                now = self.slots.having(Status.RUNNING)
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
        if len(ahead) < len(self.slots.having(Status.RUNNING)):
            return max(1, round(self._steps * _CONSTRAINED_SHARE)) if ahead else self._steps
        lengths = [-(-(1 + len(forced)) // self._most_per_step) for forced, _ in ahead.values()]
        return max(range(1, 1 + max(lengths)), key=lambda n: sum(min(n, length) for length in lengths) / (n + 1))

    def _constrain(self) -> dict[int, tuple[list[int], Bits]]:
        """Send the device the tokens that sequences with a grammar may sample next, and return them."""
        ahead = {}
        for slot, sequence in self.slots.having(Status.RUNNING).items():
            if sequence.matcher is not None:
                try:
                    ahead[slot] = sequence.matcher.ahead(MOST_FORCED)
                except Exception as failure:
                    self.slots.fail(sequence, failure)
        if ahead:
            self.device.constrain(ahead)
        return ahead

    def _compress(self) -> None:
        """Compress the sequences that are due; `Slots.make_room` has reserved the pages for that."""
        for slot in self.pool.due:
            self.pool.compress(slot)
            self.device.evict(self.pool.settle())
            self.device.compress(slot)
            self.slots.sequences[slot].left_out = self.pool.left_out(slot)

    def _take(self, slot: int, sequence: Sequence, row: StepRow) -> None:
        """Add a step's token to a sequence, and deliver the event."""
        if row.fault:
            return self.slots.stop(sequence, "error", faults.sentence(row.fault, len(sequence.trace)))
        if row.trace is None:
            return self.pool.put_ahead(slot) if sequence.is_ahead else None
        self.metrics.add_token(row.trace)
        self.pool.write(slot)
        try:
            event = sequence.take(row.trace, row.finished)
        except Exception as failure:
            return self.slots.fail(sequence, failure)
        return self.slots.end(sequence, event) if event.completion else self.slots.deliver(sequence, event)


def _compressing(config: DecoderConfig) -> Compressing | None:
    """Return the compression settings that the pool requires, or None."""
    how, layout = config.compression, config.layout
    if how is None or layout is None:
        return None
    room = layout.region * config.page_size
    return Compressing(room=room, point=partial(how.point, region=room), fresh_tokens=how.fresh_tokens)

"""A replica: its rounds admit sequences to slots, prefill their prompts, and decode a burst of steps."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

import jax

from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder
from et_jax.decode.plant import Weights
from et_jax.scope import own_settings
from et_jax.serve import chunks
from et_jax.serve.bursts import Bursts
from et_jax.serve.config import EngineConfig
from et_jax.serve.device import Device
from et_jax.serve.memory.page_pool import Compressing, PagePool
from et_jax.serve.metrics import Metrics
from et_jax.serve.programs.compilation import made
from et_jax.serve.queue import Queue
from et_jax.serve.records import prompt_read
from et_jax.serve.sequence import Sequence, Status
from et_jax.serve.slots import Slots


@contextlib.contextmanager
def placed() -> Iterator[None]:
    """Use the package's settings of JAX and no default device: a replica's arrays are on the device of its weights."""
    with own_settings(), jax.default_device(None):
        yield


class Replica:
    """The decode state of one decoder, and the sequences in its slots.

    Every round prefills at most `max_num_batched_tokens` tokens of `settings`, the rows of a step included, and decodes
    a burst of steps. With `cache_prefixes` full pages of prompts are cached and shared. Every `preempt_every` rounds
    (0: never) a sequence is preempted without need, to test that its tokens do not change.

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
        self.pool = PagePool(
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            chunk=self.config.chunk,
            cache_prefixes=cache_prefixes,
            most_per_step=self.config.most_per_step,
            compressing=_compressing(self.config),
        )
        self.lock, self.broken, self.under_way = threading.Lock(), False, False
        self._caches_prefixes, self._preempt_every = cache_prefixes, settings.preempt_every
        self._batched_tokens = settings.max_num_batched_tokens
        self._rounds = 0
        self.slots = Slots(self.config, self.device, self.pool, queue, metrics)
        self.bursts = Bursts(self.slots)

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
        with self._breaking():
            self._round()
        late = made() - before
        self.metrics.add_programs(late)
        if not (making or self.device.making):  # else a background compilation may be counted
            self.metrics.programs_compiled_late += late.programs

    @contextlib.contextmanager
    def _breaking(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def _round(self) -> None:
        self._rounds += 1
        self.end_abandoned()
        if not self.bursts.in_flight:
            if self._preempts(self._rounds):
                self.slots.preempt_one(self._rounds // self._preempt_every)
            self.slots.admit()
            self.bursts.start(pending=self._prefill())
        if self.bursts.in_flight:
            self.bursts.finish(may_run_ahead=not self._preempts(self._rounds + 1))

    def _preempts(self, number: int) -> bool:
        """Return whether a sequence is preempted without need in this round."""
        return self._preempt_every > 0 and number % self._preempt_every == 0

    @placed()
    def drain(self) -> None:
        """Deliver the tokens of the burst in flight, if there is one; the caller holds this lock and the queue's."""
        if self.bursts.in_flight and not self.broken:
            with self._breaking():
                self.bursts.finish(may_run_ahead=False)

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


def _compressing(config: DecoderConfig) -> Compressing | None:
    """Return the compression settings that the pool requires, or None."""
    how, layout = config.compression, config.layout
    if how is None or layout is None:
        return None
    room = layout.region * config.page_size
    return Compressing(room=room, point=partial(how.point, region=room), fresh_tokens=how.fresh_tokens)

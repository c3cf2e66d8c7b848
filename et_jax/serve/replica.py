"""Many sequences at once: seats them in slots, prefills, decodes in bursts, moves them out when pages run short."""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from et_jax.decode import cost, faults
from et_jax.decode.decoder import Decoder
from et_jax.decode.state import DecodeState, Request, request
from et_jax.decode.step import traffic
from et_jax.models.transformer import Params
from et_jax.serve import chunks, scheduler
from et_jax.serve.compilation import num_compiled
from et_jax.serve.metrics import Metrics
from et_jax.serve.prefix_cache import PrefixCache
from et_jax.serve.queue import Queue, Sequence
from et_jax.serve.records import Burst, StepRow
from et_jax.serve.requests import FinishReason, TokenEvent
from et_jax.types import replace

_SETTINGS = ("temperature", "top_k", "top_p", "min_p", "seed")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_LOG = logging.getLogger(__name__)


class Replica:
    """One replica: the decode state of one decoder, and the sequences that sit in its slots.

    Every round prefills at most `batched_tokens` tokens, the rows of one step included, and decodes for
    about `burst_seconds`. With `prefix_cache`, full pages of prompts are kept and shared.
    `preempt_every` rounds somebody is moved to the host and back for no need (0: never), to prove that it
    changes nothing.

    Sequences come from `queue`, and return to it where pages run short. The queue's lock is held through a
    round but while the device works; the replica's own `lock` all the while, for the state is donated. What
    fails on the host for one sequence (its tokenizer, its settings, its `deliver`) ends that sequence alone;
    any other exception within a round leaves the replica `broken`: the state is lost.
    """

    def __init__(
        self,
        params: Params,
        decoder: Decoder,
        queue: Queue,
        *,
        metrics: Metrics,
        batched_tokens: int = 512,
        burst_seconds: float = 0.05,
        prefix_cache: bool = True,
        preempt_every: int = 0,
    ) -> None:
        self.params, self.decoder, self.config, self.queue = params, decoder, decoder.config, queue
        self.metrics, self.burst_seconds = metrics, burst_seconds
        [self._device] = params.embedding.devices()
        with jax.default_device(self._device):  # where there is room for it
            self.state: DecodeState = jax.device_put(decoder.empty(), self._device)
        self._traffic = traffic(params, self.state.cache)
        self.slots: dict[int, Sequence] = {}
        self.lock, self.broken = threading.Lock(), False
        self._batched_tokens, self._preempt_every = batched_tokens, preempt_every
        self._num_multiplied = cost.num_multiplied(params)
        self._prefixes = PrefixCache(self.config.page_size) if prefix_cache else None
        self._rounds = 0
        self._steps = 1
        self._granted: list[jax.Array] = []
        queue.join(self.slots)

    # What callers do.

    def warm_up(self, tell: Callable[[str], None]) -> None:
        """Compile every program that serving can need, by running each on nothing."""
        d, none, slot = self.decoder, np.int32(0), np.int32(0)
        no_pages = np.zeros(self.config.blocks_per_slot, np.int32)
        idle = request(self.config, [0], limit=0)

        def swap(state: DecodeState) -> DecodeState:
            row, taken = jax.device_get((d.read_row(state, slot), d.read_pages(state, slot, none)))
            return d.write_pages(d.write_row(state, slot, row)[0], slot, none, taken)

        programs: dict[str, Callable[[DecodeState], DecodeState]] = {
            "prefill": lambda state: d.prefill(self.params, state, *chunks.pack(self.config, []))[0],
            "insert": lambda state: d.insert(state, slot, idle),
            "decode": lambda state: d.decode(self.params, state, none, np.bool_(False))[0],
            "release": lambda state: d.release(state, slot),
        }
        if self._prefixes is not None:
            programs["share"] = lambda state: d.share(state, slot, no_pages, none)
            programs["references"] = lambda state: d.decrement(d.increment(state, no_pages, none), no_pages, none)
        if self._can_run_short or self._preempt_every:
            programs["swap"] = swap
        before = num_compiled()
        for number, (name, run) in enumerate(programs.items(), 1):
            tell(f"compiling {name} ({number} of {len(programs)})")
            self.state = run(self.state)
        self.metrics.programs_compiled += num_compiled() - before

    def advance(self) -> None:
        """One round: seat whom pages and slots allow, prefill, decode a burst, deliver what came."""
        with self.lock, self.queue.lock:
            before = num_compiled()
            try:
                self._round()
            except BaseException:
                self.broken = True
                raise
            late = num_compiled() - before
            self.metrics.programs_compiled += late
            self.metrics.programs_compiled_late += late

    def _round(self) -> None:
        self._rounds += 1
        if self._preempt_every and self._rounds % self._preempt_every == 0:
            self._preempt_one()
        self._admit()
        pending = self._prefill()
        self._decode(pending)

    @property
    def idle(self) -> bool:
        """Whether nobody waits and nobody sits."""
        return not self.queue.waiting and not self.slots

    def end(self, sequence: Sequence) -> None:
        """End a sequence that waits, or sits here, with what it has, as "abort"."""
        self._end(sequence, self._last(sequence, "abort"))

    def forget_prefixes(self) -> None:
        """Let go of every kept page that no sequence uses."""
        if self._prefixes is not None:
            self._drop(self._prefixes.evict(len(self._prefixes)))

    # Who sits.

    def _admit(self) -> None:
        free = [slot for slot in range(self.config.num_slots) if slot not in self.slots]
        if not free or not self.queue.waiting:
            return
        chosen = self.queue.admit(len(self.slots), len(free), self._num_available(), self._claim)
        for slot, sequence in zip(free, chosen, strict=False):
            self.slots[slot] = sequence
            sequence.slot = slot
            if sequence.row is not None:
                self._swap_in(slot, sequence)

    def _preempt_one(self) -> None:
        ready = [sequence for sequence in self.slots.values() if sequence.ready]
        if ready:
            self._preempt(ready[self._rounds // self._preempt_every % len(ready)])

    def _preempt(self, sequence: Sequence) -> None:
        """Give up the slot: to the host with pages and all, or, if still prefilling, back to the start."""
        slot, state = self._vacate(sequence), self.state
        if sequence.ready:
            firsts = range(0, sequence.blocks, self.config.pages_per_swap)
            pages = [self.decoder.read_pages(state, slot, np.int32(first)) for first in firsts]
            sequence.row, sequence.swapped = self._fetched((self.decoder.read_row(state, slot), pages))
        else:
            sequence.length = sequence.blocks = 0
            sequence.begun = False
        self.state = self.decoder.release(state, slot)
        self.queue.waiting.append(sequence)
        self.metrics.preemptions += 1

    def _swap_in(self, slot: int, sequence: Sequence) -> None:
        self._make_free()
        self.state, granted = self.decoder.write_row(self.state, np.int32(slot), sequence.row)
        self._granted.append(granted)
        for number, taken in enumerate(sequence.swapped):
            first = np.int32(number * self.config.pages_per_swap)
            self.state = self.decoder.write_pages(self.state, np.int32(slot), first, taken)
        sequence.row, sequence.swapped = None, []

    def _vacate(self, sequence: Sequence) -> np.int32:
        assert sequence.slot is not None
        slot, sequence.slot = sequence.slot, None
        del self.slots[slot]
        if self._prefixes is not None:
            self._prefixes.unlock(sequence.kept)
        sequence.kept, sequence.shared = [], 0
        return np.int32(slot)

    def _end(self, sequence: Sequence, event: TokenEvent) -> None:
        """Empty its slot, if it has one, and deliver its last event."""
        if sequence.slot is not None:
            self.state = self.decoder.release(self.state, self._vacate(sequence))
        sequence.row, sequence.swapped = None, []
        if event.completion is not None:
            done = event.completion
            self.metrics.finish(done.finish_reason)
            self.metrics.entropic_time += done.entropic_time
            self.metrics.cost += done.cost
            self.metrics.flops += done.flops
            if sequence.admitted is not None:
                self.metrics.waiting_seconds += sequence.admitted - sequence.arrived
                self.metrics.serving_seconds += time.monotonic() - sequence.admitted
        self._deliver(sequence, event)

    def _last(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> TokenEvent:
        """The last event of a sequence, with the text that was held back where its tokenizer still gives it."""
        try:
            return sequence.text.end(reason, error=error)
        except Exception as failure:
            return sequence.text.fail(error or _sentence(failure))

    def _fail(self, sequence: Sequence, failure: Exception) -> None:
        """End a sequence for which something failed on the host; the others go on."""
        self._end(sequence, sequence.text.fail(_sentence(failure)))

    def _deliver(self, sequence: Sequence, event: TokenEvent) -> None:
        try:
            sequence.deliver(event)
        except Exception as failure:
            if event.completion is None:
                return self._fail(sequence, failure)
            _LOG.exception("The end of a sequence could not be delivered; its caller does not hear of it.")
        return None

    # Pages.

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.page_size)

    @property
    def _can_run_short(self) -> bool:
        return self.config.num_pages - 1 < self.config.num_slots * self.config.blocks_per_slot

    def _claim(self, sequence: Sequence) -> int:
        """Pages a sequence needs to take its next step."""
        return self._blocks(sequence.length + 1 if sequence.ready else len(sequence.text.tokens))

    @property
    def _num_free(self) -> int:
        """Free pages by the host's books, which the table on the device agrees with, or will."""
        kept = 0 if self._prefixes is None else len(self._prefixes)
        own = sum(sequence.blocks - sequence.shared for sequence in self.slots.values())
        return self.config.num_pages - 1 - kept - own

    def _num_available(self) -> int:
        """Pages free, or kept for nobody in particular, less what those still prefilling have yet to take."""
        promised = sum(self._claim(other) - other.blocks for other in self.slots.values() if not other.ready)
        idle = 0 if self._prefixes is None else self._prefixes.num_idle
        return self._num_free + idle - promised

    def _make_free(self, num_pages: int = 0) -> None:
        """Let go of kept pages until `num_pages` are free beyond those in the books."""
        short = num_pages - self._num_free
        if self._prefixes is not None and short > 0:
            self._drop(self._prefixes.evict(short))

    def _drop(self, pages: list[int]) -> None:
        most = self.config.blocks_per_slot
        for start in range(0, len(pages), most):
            part = pages[start : start + most]
            self.state = self.decoder.decrement(self.state, _padded(part, most), np.int32(len(part)))

    def _make_room(self, num_steps: int) -> int:
        """Return how many steps everybody has pages for, at least one, moving out as few as that takes."""
        while True:
            growing = [sequence for sequence in self.slots.values() if sequence.ready]
            needed = sum(self._growth(sequence, num_steps) for sequence in growing)
            short = needed - self._num_available()
            if short <= 0:
                self._make_free(needed)
                return num_steps
            if num_steps > 1:
                num_steps //= 2
                continue
            priority = self._fetched(self.state.control.priority)
            running = list(self.slots.items())
            preempted = scheduler.preempted(
                [self._as_running(slot, sequence, priority) for slot, sequence in running], short
            )
            if not preempted:
                raise RuntimeError(f"one sequence alone lacks {short} pages, which its admission had counted on")
            for index in preempted:
                self._preempt(running[index][1])

    def _growth(self, sequence: Sequence, num_steps: int) -> int:
        left = sequence.text.limit - len(sequence.text.trace)
        return self._blocks(sequence.length + min(num_steps, left)) - sequence.blocks

    def _as_running(self, slot: int, sequence: Sequence, priority: np.ndarray) -> scheduler.Running:
        shared = 0 if self._prefixes is None else self._prefixes.num_shared(sequence.kept)
        return scheduler.Running(
            arrival=sequence.turn,
            priority=float(priority[slot]) if sequence.ready else -np.inf,
            pages=max(sequence.blocks, self._claim(sequence)) - shared,
        )

    # Prompts.

    def _prefill(self) -> bool:
        """Prefill within the round's budget; return whether prompts are left for the next."""
        running = sum(sequence.ready for sequence in self.slots.values())
        budget = max(1, (self._batched_tokens - running) // self.config.prefill_batch)
        while True:
            self._insert_whole()
            for slot, sequence in list(self.slots.items()):
                if not sequence.begun:
                    self._begin(slot, sequence)
            self._insert_whole()  # those of whose prompts every page was kept
            unready = [sequence for sequence in self.slots.values() if not sequence.ready]
            chosen = self._choose_parts(unready)
            if not chosen or not budget:
                return bool(unready)
            self._prefill_parts(chosen)
            budget -= 1

    def _choose_parts(self, sequences: list[Sequence]) -> list[tuple[Sequence, list[int]]]:
        """Return the parts for the next call, of prompts that have begun, first come first served."""
        begun = sorted((sequence for sequence in sequences if sequence.begun), key=lambda sequence: sequence.turn)
        left = ((sequence, chunks.split(self.config, sequence.text.tokens[sequence.length : -1])) for sequence in begun)
        chosen = ((sequence, part) for sequence, each in left for part in each)
        return list(itertools.islice(chosen, chunks.rows_per_call(self.config)))

    def _prefill_parts(self, chosen: list[tuple[Sequence, list[int]]]) -> None:
        """Prefill parts of prompts in one call."""
        for sequence, tokens in chosen:
            sequence.length += len(tokens)
            sequence.blocks = self._blocks(sequence.length)
        self._make_free()
        rows = chunks.pack(self.config, [(sequence.slot, tokens) for sequence, tokens in chosen])
        self.state, granted = self.decoder.prefill(self.params, self.state, *rows)
        self._granted.append(granted)

    def _kept_pages(self, prefixes: PrefixCache, tokens: list[int]) -> list[int]:
        """Return the pages kept of a prompt's beginning: whole parts of them, none that a step would write."""
        found = prefixes.find(tokens, (len(tokens) - 1) // self.config.page_size)
        per_chunk = self.config.chunk // self.config.page_size
        return found[: len(found) // per_chunk * per_chunk]

    def _awaits_another(self, sequence: Sequence) -> bool:
        """Whether the next part of its prompt that nobody keeps is just being prefilled for somebody else."""
        if self._prefixes is None:
            return False
        tokens = sequence.text.tokens
        end = len(self._kept_pages(self._prefixes, tokens)) * self.config.page_size + self.config.chunk
        others = (one.text.tokens for one in self.slots.values() if one.begun and not one.ready)
        return any(end < len(tokens) and end < len(other) and other[:end] == tokens[:end] for other in others)

    def _begin(self, slot: int, sequence: Sequence) -> None:
        """Take over the pages kept of this prompt, unless more of them are just coming."""
        found: list[int] = []
        try:
            if self._awaits_another(sequence):
                return
            if self._prefixes is not None:
                found = self._kept_pages(self._prefixes, sequence.text.tokens)
        except Exception as failure:
            return self._fail(sequence, failure)
        sequence.begun = True
        self.metrics.prompt_tokens += len(sequence.text.tokens)
        if found and self._prefixes is not None:
            pages = _padded(found, self.config.blocks_per_slot)
            self.state = self.decoder.share(self.state, np.int32(slot), pages, np.int32(len(found)))
            self._prefixes.lock(found)
            sequence.kept = found
            sequence.blocks = sequence.shared = len(found)
            sequence.length = len(found) * self.config.page_size
            self.metrics.cached_prompt_tokens += sequence.length

    def _insert_whole(self) -> None:
        """Insert the sequences whose prompts are in the cache as a whole."""
        unready = ((slot, sequence) for slot, sequence in self.slots.items() if sequence.begun and not sequence.ready)
        whole = [(slot, sequence) for slot, sequence in unready if sequence.length == len(sequence.text.tokens) - 1]
        if whole:
            for slot, sequence in whole:
                self._insert(slot, sequence)
            if self._prefixes is not None:
                table = self._fetched(self.state.table.pages)
                for slot, sequence in whole:
                    if sequence.ready:
                        self._keep(self._prefixes, sequence, table[slot].tolist())

    def _insert(self, slot: int, sequence: Sequence) -> None:
        """Make a sequence whose prompt is in the cache ready to decode."""
        try:
            asked = self._asked(sequence)
        except Exception as failure:
            return self._fail(sequence, failure)
        self.state = self.decoder.insert(self.state, np.int32(slot), asked)
        sequence.ready = True
        return None

    def _asked(self, sequence: Sequence) -> Request:
        text = sequence.text
        settings = {name: getattr(text.params, name) for name in (*_SETTINGS, *_PENALTIES)}
        return request(
            self.config,
            text.tokens,
            limit=text.limit,
            arrival=sequence.turn,
            index=text.index,
            stop_ids=text.stop_ids,
            logprobs=text.params.logprobs > 0,
            urgency=self._urgency(sequence),
            **settings,
        )

    def _keep(self, prefixes: PrefixCache, sequence: Sequence, row: list[int]) -> None:
        """Keep the full pages of the prompt of a sequence whose pages are `row`."""
        full = sequence.length // self.config.page_size
        prompt = sequence.text.tokens[: full * self.config.page_size]
        fresh = prefixes.add(prompt, row[:full])
        if fresh:
            pages = _padded(fresh, self.config.blocks_per_slot)
            self.state = self.decoder.increment(self.state, pages, np.int32(len(fresh)))
            sequence.shared += len(fresh)
        path = prefixes.find(prompt, full)  # kept pages that the sequence computed anew are among them
        prefixes.lock([page for page in path if page not in sequence.kept])
        sequence.kept = path

    # Tokens.

    def _urgency(self, sequence: Sequence) -> float:
        return scheduler.urgency(sequence.priority, sequence.deadline, time.monotonic() - sequence.arrived)

    def _decode(self, pending: bool) -> None:
        """Run a burst: one step while prompts are `pending`, else as many as the clock allows."""
        if not any(sequence.ready for sequence in self.slots.values()):
            return
        if any(sequence.deadline is not None for sequence in self.slots.values()):
            urgency = np.zeros(self.config.num_slots, np.float32)
            urgency[list(self.slots)] = [self._urgency(sequence) for sequence in self.slots.values()]
            # Put where the state is, or it would be another program.
            self.state = replace(self.state, urgency=jax.device_put(urgency, self._device))
        steps = self._make_room(1 if pending else self._steps)
        prefilled = bool(self._granted)
        began = time.perf_counter()
        self.state, outputs, ran = self.decoder.decode(
            self.params, self.state, np.int32(steps), np.bool_(bool(self.queue.waiting))
        )
        asked = {slot: sequence.text.params.logprobs for slot, sequence in self.slots.items()}
        if not any(asked.values()):
            outputs = replace(outputs, top_tokens=None, top_logprobs=None)
        output, ran, granted = self._fetched((outputs, ran, self._granted))
        self._granted = []
        ran = int(ran)
        if not all(map(np.all, granted)) or output.refused[:ran].any():
            raise RuntimeError("a sequence was promised pages and did not get them")
        if not prefilled:  # whose time would be counted with that of the steps
            per_step = (time.perf_counter() - began) / max(ran, 1)
            self._steps = int(np.clip(self.burst_seconds / per_step, 1, self.config.max_steps))
        self.metrics.steps += ran
        burst = Burst(self.config, self._traffic, self._num_multiplied, output, ran)
        for step in range(ran):
            ready = {slot: sequence for slot, sequence in self.slots.items() if sequence.ready}
            num_served = burst.num_served(step, ready)
            self._count_idle(num_served)
            for slot, sequence in ready.items():
                self._take(sequence, burst.row(step, slot, asked[slot], num_served))

    def _count_idle(self, num_served: int) -> None:
        """Count the rows of a step that brought nobody a token: empty, failed, or past the end of their text."""
        num_idle = self.config.batch - num_served
        self.metrics.idle_flops += num_idle * cost.token_flops(self._num_multiplied, 0, 1, 1)
        self.metrics.idle_cost += 0.0 if num_served else float(self._traffic.weights)

    def _take(self, sequence: Sequence, row: StepRow) -> None:
        """Hand on what a step did for a sequence."""
        text = sequence.text
        if row.fault:
            return self._end(sequence, self._last(sequence, "error", faults.sentence(row.fault, len(text.trace))))
        if row.trace is None:
            return None
        self.metrics.generated_tokens += 1
        sequence.length += 1
        sequence.blocks = self._blocks(sequence.length)
        try:
            event = text.take(row.trace, row.finished)
        except Exception as failure:
            return self._fail(sequence, failure)
        return self._end(sequence, event) if event.completion else self._deliver(sequence, event)

    def _fetched(self, tree: Any) -> Any:
        """Return arrays of the device as numpy's; until they are there, other replicas go on."""
        self.queue.lock.release()
        try:
            return jax.device_get(tree)
        finally:
            self.queue.lock.acquire()


def _sentence(failure: Exception) -> str:
    """What the completion of a sequence says that failed on the host."""
    return f"Serving this request failed ({type(failure).__name__}: {str(failure)[:200]}); the others go on."


def _padded(values: list[int], size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    whole = np.zeros(size, np.int32)
    whole[: len(values)] = values
    return whole

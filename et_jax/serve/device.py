"""The device side of a replica: the state of one decoder, and every operation on it, with host values as arguments.

The caller decides on slots and pages; here slots are numbers and pages are lists of numbers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from et_jax.control.draft import DraftLength
from et_jax.decode.config import Variant
from et_jax.decode.decoder import Decoder
from et_jax.decode.fresh import law_numbers
from et_jax.decode.packed import Packed
from et_jax.decode.plant import Weights
from et_jax.decode.request import Request, request
from et_jax.decode.sampling.steering import MOST_FORCED, UNLIMITED
from et_jax.decode.slots import Pages, SlotRow
from et_jax.decode.state import DecodeState, wants_drafts
from et_jax.io import later
from et_jax.models.model import device_of
from et_jax.serve import chunks
from et_jax.serve.programs.executables import CachedProgram
from et_jax.serve.programs.few_rows import FewRows
from et_jax.text.grammar import Bits
from et_jax.types import replace


class Device:
    """The decode state of a decoder, on the device of its weights; methods replace `state` by a new one.

    `promises` are device results, not fetched yet, that say whether pages were granted.
    """

    def __init__(self, weights: Weights, decoder: Decoder) -> None:
        self.weights, self.decoder, self.config = weights, decoder, decoder.config
        mesh = self.config.mesh
        if mesh is None:
            self._where = device_of(weights)
            with jax.default_device(self._where):  # the state may not fit on another device
                self.state: DecodeState = jax.device_put(decoder.empty(), self._where)
        else:
            self._where = NamedSharding(mesh, PartitionSpec())  # of arrays replicated on every chip
            self.state = decoder.empty()
        self.promises: list[jax.Array] = []
        self._drafting: Future[object] | None = None  # the background compilation of the drafting program
        # The program that decodes every sequence, and the one for sequences of the decoder's own controller.
        [platform] = {device.platform for device in jax.tree.leaves(weights)[0].devices()}
        full = self.config.full_variant
        self._full, self._usual = full, full._replace(chooses=self.config.may_choose(self.config.controller))
        self._few = {one: FewRows(decoder, one, platform) for one in {self._full, self._usual}}

    @property
    def making(self) -> bool:
        """Whether a program is being compiled in the background: the drafting one, or one of few rows."""
        drafting = self._drafting is not None and not self._drafting.done()
        return drafting or any(few.making for few in self._few.values())

    def warm_up(self, report: Callable[[str], None], *, shares: bool, swaps: bool, drafts: bool = True) -> None:
        """Compile every program that serving can need, by running each with no sequences.

        `shares` and `swaps` include the programs that share pages and swap sequences. Without `drafts` another thread
        compiles the drafting program, and steps have no drafts until it is ready. If the controller's sequences are
        never long enough for block selection, the program with selection is compiled when a request requires it.
        """
        programs: dict[str, Callable[[], Any]] = {
            "prefill": lambda: self.prefill([]),
            "insert": lambda: self.insert(0, request(self.config, [0], limit=0)),
            "release": lambda: self.release(0),
        }
        if self.config.compression is not None:
            programs["compress"] = lambda: self.compress(0)
        if shares:
            programs["share"] = lambda: self.share(0, [])
            programs["references"] = self._count_nothing
        if swaps:
            programs["swap"] = lambda: self.swap_in(0, *jax.device_get(self.swap_out(0, 1)))
        programs["decode"] = lambda: self._burst(first, 0, until_end=False)
        if drafts and self.config.pruned is not None:
            programs["decode without drafts"] = lambda: self._burst(plain, 0, until_end=False)
        asked, usual = self._nothing_to_decode, self._usual
        first, drafting, lasting = self.decoder.variants[usual], None, True
        plain = self.decoder.variants[usual._replace(drafts=False)]
        if not drafts and self.config.draft is not None and isinstance(first, CachedProgram):
            lasting = not first.is_cached(*asked)
            first, drafting = plain, first.ahead(*asked)
        beside = later.worker(lasting=lasting)  # compiles the largest program concurrently; it runs after the others
        if isinstance(first, CachedProgram):
            ahead = beside.submit(first.ahead(*asked))
            programs["decode"] = lambda: (ahead.result(), self._burst(first, 0, until_end=False))
        if drafting is not None:
            self._drafting = beside.submit(drafting)
        try:
            for number, (name, run) in enumerate(programs.items(), 1):
                report(f"compiling {name} ({number} of {len(programs)})")
                run()
        finally:
            beside.shutdown(wait=False)
        self.promises = []

    # Sequences.

    def prefill(self, rows: Sequence[tuple[int, list[int]]], ends: Collection[int] = ()) -> None:
        """Append chunks of prompts to their slots in one call; the prompts of the slots `ends` end here."""
        packed = chunks.pack(self.config, rows, ends)
        self.state, granted = self.decoder.prefill(self.weights, self.state, *packed)
        self.promises.append(granted)

    def insert(self, slot: int, asked: Request) -> None:
        """Start a sequence whose prompt is in the cache."""
        self.state = self.decoder.insert(self.state, np.int32(slot), asked)

    def constrain(self, ahead: Mapping[int, tuple[list[int], Bits]]) -> None:
        """Set the forced next tokens of some slots and the tokens permitted after them; then these slots pause."""
        slots, steering = self.config.num_slots, self.state.steering
        assert steering is not None
        bits = np.full(steering.next.shape, 0xFFFFFFFF, np.uint32)
        forced = np.full((slots, MOST_FORCED), -1, np.int32)
        allowance = np.full(slots, UNLIMITED, np.int32)
        for slot, (tokens, after) in ahead.items():
            bits[slot], allowance[slot] = after, 1 + len(tokens)
            forced[slot, MOST_FORCED - len(tokens) :] = tokens
        bits, forced, allowance = jax.device_put((bits, forced, allowance), self._where)
        self.state = replace(self.state, allowance=allowance, steering=replace(steering, forced=forced, next=bits))

    def decode(
        self, num_steps: int, running: int, *, may_choose: bool = True, until_end: bool
    ) -> tuple[Packed, Variant]:
        """Start a burst of steps for `running` sequences, with block selection only if `may_choose`.

        Returns the outputs on the device, in one array whose copy to the host has begun, and the program that runs. A
        model that drafts for itself records the blocks it reads while the draft law asks for drafts. When it asks for
        none, the plain program runs.
        """
        full = self._full if may_choose else self._usual
        few = self._few[full].chosen(running)
        variant = self._of_all_rows(full) if few is None else full._replace(rows=few)
        burst = self._burst(self.decoder.variants[variant], num_steps, until_end=until_end)
        jax.copy_to_host_async(burst)
        return burst, variant

    def _of_all_rows(self, full: Variant) -> Variant:
        """Return the program of all rows to run, with drafts or without."""
        plain = full._replace(drafts=False)
        if self._drafting is not None:
            if not self._drafting.done():
                return plain
            self._drafting.result()  # raises the error of a failed compilation
            self._drafting = None
        return plain if self.config.pruned is not None and not wants_drafts(self.state) else full

    def record(self, running: int, variant: Variant, seconds: float) -> None:
        """Record the seconds of a burst of `running` sequences, with the prefill before it, for `FewRows`."""
        full = self._full if variant.chooses else self._usual
        self._few[full].record(running, variant.rows, seconds, *self._nothing_to_decode)

    @property
    def _nothing_to_decode(self) -> tuple[Any, ...]:
        """The arguments with which a decode program runs no step."""
        return self.weights, self.state, np.int32(0), np.bool_(False)

    def _burst(self, decode: Callable[..., Any], num_steps: int, *, until_end: bool) -> Packed:
        self.state, burst = decode(self.weights, self.state, np.int32(num_steps), np.bool_(until_end))
        return burst

    def set_draft_laws(self, laws: tuple[DraftLength, ...]) -> None:
        """Set the numbers of the laws of draft lengths."""
        self.state = replace(self.state, draft_laws=jax.device_put(law_numbers(laws), self._where))

    def compress(self, slot: int) -> None:
        """Compress a slot's cache as the configuration specifies."""
        self.state, granted = self.decoder.compress(self.state, np.int32(slot))
        self.promises.append(granted)

    def release(self, slot: int) -> None:
        """Empty a slot."""
        self.state = self.decoder.release(self.state, np.int32(slot))

    def swap_out(self, slot: int, num_pages: int) -> tuple[SlotRow, list[Pages]]:
        """Return copies, still on the device, of a slot's row of the state and of its pages."""
        firsts = range(0, num_pages, self.config.pages_per_swap)
        pages = [self.decoder.read_pages(self.state, np.int32(slot), np.int32(first)) for first in firsts]
        return self.decoder.read_row(self.state, np.int32(slot)), pages

    def swap_in(self, slot: int, row: SlotRow, pages: list[Pages]) -> None:
        """Restore the copies of `swap_out` into an empty slot."""
        self.state, granted = self.decoder.write_row(self.state, np.int32(slot), row)
        self.promises.append(granted)
        for number, taken in enumerate(pages):
            first = np.int32(number * self.config.pages_per_swap)
            self.state = self.decoder.write_pages(self.state, np.int32(slot), first, taken)

    def fill(self, slot: int, num_tokens: int, pages: list[Pages]) -> None:
        """Fill an empty slot with `num_tokens` tokens of a prompt, whose pages `swap_out` copied earlier."""
        row = jax.device_get(self.decoder.read_row(self.state, np.int32(slot)))
        self.swap_in(slot, row | {"length": np.int32(num_tokens)}, pages)

    def set_urgency(self, urgency: dict[int, float]) -> None:
        """Set the urgency of the sequences in these slots; that of other slots becomes 0."""
        values = np.zeros(self.config.num_slots, np.float32)
        values[list(urgency)] = list(urgency.values())
        # Put on the device of the state; elsewhere it would compile another program.
        self.state = replace(self.state, urgency=jax.device_put(values, self._where))

    def set_adapters(self, adapters: dict[int, int]) -> None:
        """Set the adapter numbers of the sequences in these slots; other slots have none."""
        numbers = np.zeros(self.config.num_slots, np.int32)
        numbers[list(adapters)] = list(adapters.values())
        plant = replace(self.state.plants[0], adapter=jax.device_put(numbers, self._where))
        self.state = self.state.with_plant(0, plant)

    # Pages.

    def share(self, slot: int, pages: list[int]) -> None:
        """Start an empty slot with cached prefix pages."""
        self.state = self.decoder.share(self.state, np.int32(slot), *self._padded(pages))

    def reference(self, pages: list[int]) -> None:
        """Add a reference to each of a slot's pages, until `evict`."""
        if pages:
            self.state = self.decoder.increment(self.state, *self._padded(pages))

    def evict(self, pages: list[int]) -> None:
        """Drop a reference to each of these pages, of any number."""
        most = self.config.blocks_per_slot
        for start in range(0, len(pages), most):
            self.state = self.decoder.decrement(self.state, *self._padded(pages[start : start + most]))

    def _count_nothing(self) -> None:
        self.state = self.decoder.increment(self.state, *self._padded([]))
        self.state = self.decoder.decrement(self.state, *self._padded([]))

    def _padded(self, pages: list[int]) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.int32]:
        """Return pages in an array of a fixed size, and their number."""
        padded = np.zeros(self.config.blocks_per_slot, np.int32)
        padded[: len(pages)] = pages
        return padded, np.int32(len(pages))

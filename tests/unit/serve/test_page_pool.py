"""The books of the pool against the table of the device, event by event, and what each of its answers promises."""

import itertools
from functools import partial

import jax
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from et_jax.control.compression import Compression
from et_jax.decode.cache import pages
from et_jax.serve.memory.page_pool import Compressing, PagePool
from et_jax.serve.memory.prefix_cache import PrefixCache

SIZE, CHUNK, SLOTS, BLOCKS, PAGES = 2, 4, 3, 7, 9  # eight pages for slots that could fill twenty-one
STEPS, MOST_PER_STEP, PER_CHUNK = 6, 3, CHUNK // SIZE

reserve = jax.jit(partial(pages.reserve, most=BLOCKS))
release, share = jax.jit(pages.release), jax.jit(pages.share)
increment, decrement = jax.jit(pages.increment), jax.jit(pages.decrement)
beginnings = st.sampled_from([[1] * 9, [1] * 5 + [2] * 4, [3] * 9])
lengths = st.sampled_from([1, 2, 4, 5, 6, 7, 9, 9])
prompts = st.builds(lambda whole, length: whole[:length], beginnings, lengths)  # many of which begin alike


def padded(numbers: list[int], size: int = PAGES) -> tuple[np.ndarray, np.int32]:
    whole = np.zeros(size, np.int32)
    whole[: len(numbers)] = numbers
    return whole, np.int32(len(numbers))


def compressing(room: int) -> Compressing:
    how = Compression(budget=room, window=2, gap=1, every=2)
    return Compressing(room=room, point=partial(how.point, region=room), fresh_tokens=2)


class Pool(RuleBasedStateMachine):
    """Plays the replica: tells the pool what it does, does to the table what the pool answers, and compares."""

    room = 0

    def __init__(self):
        super().__init__()
        sizes = {"num_pages": PAGES, "page_size": SIZE, "chunk": CHUNK, "most_per_step": MOST_PER_STEP}
        how = compressing(self.room) if self.room else None
        self.pool = PagePool(cache_prefixes=True, compressing=how, **sizes)
        self.shift: dict[int, int] = {}  # tokens that compression left out
        self.table = pages.empty(SLOTS, BLOCKS, PAGES)
        self.prompt: dict[int, list[int]] = {}
        self.most: dict[int, int] = {}
        self.written: dict[int, int] = {}  # tokens in the cache, of slots that have begun
        self.running: set[int] = set()
        self.swapped: list[tuple[list[int], int, int, int]] = []
        self.kept: dict[int, tuple[int, ...]] = {}  # what a prompt began with, up to a page's own last token

    # What the device does.

    def evict(self, gone: list[int]) -> None:
        assert (np.asarray(self.table.references)[gone] == 1).all(), "a page is evicted that a slot uses"
        for page in gone:
            del self.kept[page]
        self.table = decrement(self.table, *padded(gone))

    def grow(self, blocks: dict[int, int]) -> None:
        wanted = np.zeros(SLOTS, np.int32)
        wanted[list(blocks)] = list(blocks.values())
        self.table, granted = reserve(self.table, wanted)
        assert granted.all(), "pages were promised and are not there"

    def blocks(self, tokens: int) -> int:
        return -(-tokens // SIZE)

    def cached(self, slot: int) -> int:
        return self.written.get(slot, 0) - self.shift.get(slot, 0)

    def preempt(self, slot: int) -> None:
        if slot in self.running:
            self.swapped.append((self.prompt[slot], self.most[slot], self.written[slot], self.shift.get(slot, 0)))
        self.empty(slot)

    def empty(self, slot: int) -> None:
        self.pool.release(slot)
        self.table = release(self.table, slot)
        self.running.discard(slot)
        for held in (self.prompt, self.most, self.written, self.shift):
            held.pop(slot, None)

    def free_slot(self) -> int | None:
        return next((slot for slot in range(SLOTS) if slot not in self.prompt), None)

    def fits(self, tokens: int) -> bool:
        return self.pool.pages_for(tokens) + len(self.prompt) <= self.pool.num_available

    # Events.

    @precondition(lambda self: self.free_slot() is not None)
    @rule(asked=st.lists(st.tuples(prompts, st.integers(1, 6)), min_size=1, max_size=SLOTS))
    def admit(self, asked):
        for prompt, limit in asked:
            slot, most = self.free_slot(), len(prompt) - 1 + limit
            if slot is not None and self.fits(len(prompt)):
                self.pool.admit(slot, prompt, most)
                self.prompt[slot], self.most[slot] = prompt, most

    def fits_again(self) -> bool:
        return self.fits(self.swapped[0][2] - self.swapped[0][3] + 1)

    @precondition(lambda self: self.swapped and self.free_slot() is not None and self.fits_again())
    @rule()
    def swap_in(self):
        slot, (prompt, most, written, shift) = self.free_slot(), self.swapped[0]
        assert slot is not None
        del self.swapped[0]
        self.pool.swap_in(slot, prompt, most, written)
        self.evict(self.pool.settle())
        self.prompt[slot], self.most[slot], self.written[slot], self.shift[slot] = prompt, most, written, shift
        self.grow({slot: self.blocks(self.cached(slot))})
        self.running.add(slot)

    @precondition(lambda self: set(self.prompt) - self.running)
    @rule(data=st.data(), calls=st.integers(1, 9))
    def prefill(self, data, calls):
        """What comes next of some prompts: shared pages, a chunk, the start of decoding."""
        order = data.draw(st.permutations(range(SLOTS)))
        for number in range(calls):
            slot = order[number % SLOTS]
            if slot in set(self.prompt) - self.running:
                (self.go_on if slot in self.written else self.begin)(slot)

    def begin(self, slot):
        found = self.pool.begin(slot)
        prefilling = [other for other in self.written if other not in self.running]
        if found is None:
            assert any(self.prompt[other][:CHUNK] == self.prompt[slot][:CHUNK] for other in prefilling)
            return
        kept = {beginning: page for page, beginning in self.kept.items()}
        assert len(kept) == len(self.kept)
        anew = 2 if self.room else 1  # tokens that are computed anew wherever a prompt is served
        known = list(itertools.takewhile(kept.__contains__, self.beginnings(slot, anew)))
        assert found == [kept[one] for one in known[: len(known) // PER_CHUNK * PER_CHUNK]]
        if found:
            self.table = share(self.table, slot, *padded(found, BLOCKS))
        self.written[slot] = len(found) * SIZE

    def go_on(self, slot):
        left = len(self.prompt[slot]) - 1 - self.written[slot]
        if left:
            self.pool.write(slot, min(left, CHUNK))
            self.written[slot] += min(left, CHUNK)
            self.evict(self.pool.settle())
            self.grow({slot: self.blocks(self.written[slot])})
            return
        self.pool.run(slot)
        self.running.add(slot)
        fresh = self.pool.cache(slot, self.table.pages[slot].tolist())
        full = dict(zip(self.table.pages[slot].tolist(), self.beginnings(slot, 1), strict=False))
        assert fresh == [page for page, beginning in full.items() if beginning not in self.kept.values()]
        self.kept |= {page: full[page] for page in fresh}
        self.table = increment(self.table, *padded(fresh))

    def beginnings(self, slot: int, anew: int) -> list[tuple[int, ...]]:
        """What the full pages of a prompt stand for, but for so many tokens at its end."""
        prompt = self.prompt[slot]
        return [tuple(prompt[: SIZE * (i + 1)]) for i in range(max(len(prompt) - anew, 0) // SIZE)]

    @precondition(lambda self: self.running)
    @rule(wanted=st.integers(1, STEPS), victims=st.randoms(use_true_random=False), drafts=st.booleans())
    def decode(self, wanted, victims, drafts):
        """As many steps as there are pages for; where there are none for one, slots are preempted at random."""
        wanted = min(wanted, self.pool.steps_to_point or wanted)
        steps = self.pool.affordable(wanted)
        fitting = [wanted >> halvings for halvings in range(wanted.bit_length())]
        assert steps == max((n for n in fitting if self.pool.shortage(n) <= 0), default=1)
        while (short := self.pool.shortage(steps)) > 0:
            assert steps == 1 and len(self.prompt) > 1
            slot = victims.choice(sorted(self.prompt))
            freed, before = self.pool.num_freed(slot), self.pool.num_available
            grew = self.pool.growth(1)
            self.preempt(slot)
            assert self.pool.num_available >= before + freed - 1 and self.pool.growth(1) <= grew
            assert self.pool.shortage(1) < short or not freed
        self.evict(self.pool.settle(self.pool.growth(steps)))
        for _ in range(steps):
            going = [slot for slot in sorted(self.running) if self.written[slot] < self.most[slot]]
            for slot in going:
                most = MOST_PER_STEP if drafts else 1
                left = min(self.most[slot] - self.written[slot], self.until_point(slot))
                brought = min(victims.randint(1, most), left)
                for _ in range(brought):
                    self.pool.write(slot)
                self.written[slot] += brought
            self.grow({slot: self.blocks(self.cached(slot)) for slot in going})
        self.compress()

    def until_point(self, slot) -> int:
        """How many tokens of a sequence a step may verify: none past the point where it is compressed."""
        if not self.room:
            return MOST_PER_STEP
        point = compressing(self.room).point(len(self.prompt[slot]), self.shift.get(slot, 0))
        assert point is not None and point > self.written[slot]
        return point - self.written[slot]

    def compress(self):
        """What the replica does once a burst is over."""
        for slot in self.pool.due:
            self.pool.compress(slot)
            self.evict(self.pool.settle())
            self.table = release(self.table, slot)
            self.shift[slot] = self.written[slot] - self.room
            self.grow({slot: self.blocks(self.room)})

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finishes=st.booleans())
    def leave(self, data, finishes):
        (self.empty if finishes else self.preempt)(data.draw(st.sampled_from(sorted(self.prompt))))

    @precondition(lambda self: self.kept and not self.prompt)
    @rule()
    def forget(self):
        self.evict(self.pool.forget())

    # What holds after every event.

    @invariant()
    def both_count_the_same_free_pages(self):
        assert self.pool.num_free == int(self.table.num_free)

    @invariant()
    def references_are_the_slots_and_the_kept_pages(self):
        held = np.asarray(self.table.pages)
        expected = np.bincount(held[held > 0], minlength=PAGES)
        expected[list(self.kept)] += 1
        np.testing.assert_array_equal(self.table.references, expected)
        assert self.pool.num_cached == len(self.kept)

    @invariant()
    def slots_hold_the_pages_of_what_is_written(self):
        held = [self.blocks(self.cached(slot)) for slot in range(SLOTS)]
        assert self.table.num_blocks.tolist() == held
        assert all(self.pool.num_allocated(slot) == held[slot] for slot in self.prompt)
        assert all(self.pool.written(slot) == self.written.get(slot, 0) for slot in self.prompt)
        assert all(self.pool.left_out(slot) == self.shift.get(slot, 0) for slot in self.prompt)

    @invariant()
    def what_was_promised_is_there(self):
        """Prompts that are not prefilled yet can be, for every page of theirs is free or can be evicted."""
        assert self.pool.num_available >= 0


class CompressingPool(Pool):
    """The same where sequences are compressed, once a decoded token is in the cache and every second after it.

    Up to that point a step may bring several tokens.
    """

    room = 4

    @invariant()
    def no_sequence_is_past_its_point(self):
        assert not self.pool.due and (self.pool.steps_to_point or 1) > 0
        assert all(self.cached(slot) <= max(self.room + 2, len(self.prompt[slot]) + 1) for slot in self.running)


class WidePool(CompressingPool):
    """The same with a region that takes more than what shared pages leave of a sequence's own."""

    room = 8


for machine in (Pool, CompressingPool, WidePool):
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
TestPool, TestCompressingPool, TestWidePool = Pool.TestCase, CompressingPool.TestCase, WidePool.TestCase


def test_the_least_recently_used_goes_first_its_end_before_its_beginning_and_what_is_locked_never():
    index = PrefixCache(1)
    assert (index.add([1, 2], [10, 11]), index.add([3], [12]), index.add([4], [13])) == ([10, 11], [12], [13])
    index.lock([13])
    assert index.find([1], 9) == [10]
    index.lock([10, 11])
    index.lock([10])
    assert index.num_shared([10, 11]) == 1
    index.unlock([10])
    index.unlock([10, 11])
    assert [index.evict(1) for _ in range(4)] == [[11], [12], [10], []]
    index.unlock([13])
    assert index.evict(9) == [13]


def test_pages_of_one_adapter_serve_no_other():
    pool = PagePool(num_pages=20, page_size=2, chunk=2, cache_prefixes=True)
    prompt = [1, 2, 3, 4, 5]

    def served(slot: int, adapter: int, pages: list[int]) -> list[int] | None:
        pool.admit(slot, prompt, 9, adapter)
        found = pool.begin(slot)
        if found is not None:
            pool.write(slot, len(prompt) - 1 - 2 * len(found))
            pool.run(slot)
            pool.cache(slot, pages)
            pool.release(slot)
        return found

    pool.admit(0, prompt, 9, 1)
    assert pool.begin(0) == [] and served(1, 2, [11, 12]) == []  # it does not wait for the other's
    pool.release(0)
    assert [served(0, adapter, [13, 14]) for adapter in (2, 1, 0)] == [[11, 12], [], []]
    assert [pool.cached_prefix(prompt, adapter) for adapter in (1, 2, 3)] == [[13, 14], [11, 12], []]

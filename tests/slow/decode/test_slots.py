"""Sequences that start, share, split, leave and move: pages balance, and every text is the one it would be alone."""

import functools

import jax
import numpy as np
import pytest
from decoders import made, row_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from small_model import (
    CHUNK,
    PAGE,
    configuration,
    fill,
    prompt,
    request,
    run,
    same_bits,
    start,
    text_of,
    texts,
    weights,
)

from et_jax.decode import decoder as decoding
from et_jax.serve.chunks import pack
from et_jax.serve.prefix_cache import PrefixCache

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SLOTS, POOL, LONGEST = 3, 14, 8 * PAGE
PROMPTS = [prompt(1, 3), prompt(2, CHUNK + 2), [*prompt(2, CHUNK + 2)[: CHUNK + 1], 7, 8, 9], prompt(3, 2 * CHUNK + 1)]


@functools.cache
def decoder() -> decoding.Decoder:
    return decoding.decoder(configuration(num_slots=SLOTS, batch=2, num_pages=POOL, max_length=LONGEST, max_steps=4))


@functools.cache
def text_alone(number: int) -> tuple[int, ...]:
    """The greedy text of a prompt, by itself in a fresh state."""
    d, tokens = decoder(), PROMPTS[number]
    state = start(d, weights(), d.empty(), 0, tokens, temperature=0.0, limit=LONGEST - len(tokens))
    text = []
    while bool(state.active[0]):
        state, output, ran = d.decode((weights(),), state, 4)
        text += np.asarray(output.token)[: int(ran), 0, 0].tolist()
    return tuple(text)


def padded(values: list[int], size: int) -> np.ndarray:
    return np.array([*values, *[0] * (size - len(values))], np.int32)


class Slots(RuleBasedStateMachine):
    """Drives the functions as an engine does, and keeps its own account of who holds which page."""

    def __init__(self):
        super().__init__()
        self.d, self.state = decoder(), decoder().empty()
        self.prefixes = PrefixCache(PAGE)
        self.seated: dict[int, tuple[int, list[int]]] = {}  # slot -> prompt, kept pages
        self.texts: dict[int, list[int]] = {}
        self.away: list[tuple] = []

    def free_slot(self):
        return next(slot for slot in range(SLOTS) if slot not in self.seated)

    def table(self):
        return jax.device_get(self.state.table)

    @precondition(lambda self: len(self.seated) < SLOTS)
    @rule(number=st.integers(0, len(PROMPTS) - 1))
    def admit(self, number):
        d, tokens, slot = self.d, PROMPTS[number], self.free_slot()
        needed = -(-len(tokens) // PAGE)
        found = self.prefixes.find(tokens, (len(tokens) - 1) // PAGE)
        found = found[: len(found) // (CHUNK // PAGE) * (CHUNK // PAGE)]
        if needed - len(found) > int(self.state.table.num_free):
            return
        self.state = d.share(self.state, slot, padded(found, d.config.blocks_per_slot), len(found))
        self.prefixes.lock(found)
        for at in range(len(found) * PAGE, len(tokens) - 1, CHUNK):
            part = tokens[at : min(at + CHUNK, len(tokens) - 1)]
            self.state, granted = d.prefill((weights(),), self.state, *pack(d.config, [(slot, part)]))
            assert granted
        self.state = d.insert(
            self.state, slot, request(tokens[-1], temperature=0.0, limit=LONGEST - len(tokens), seed=slot)
        )
        full = (len(tokens) - 1) // PAGE
        fresh = self.prefixes.add(tokens[: full * PAGE], self.table().pages[slot, :full].tolist())
        self.state = d.increment(self.state, padded(fresh, d.config.blocks_per_slot), len(fresh))
        path = self.prefixes.find(tokens, full)
        self.prefixes.lock([page for page in path if page not in found])
        self.seated[slot], self.texts[slot] = (number, path), []

    @precondition(lambda self: self.seated)
    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        self.state, output, ran = self.d.decode((weights(),), self.state, steps)
        token, produced = np.asarray(output.token)[:, 0], np.asarray(output.produced)[:, 0]
        for i in range(int(ran)):
            for slot in self.seated:
                if produced[i, slot]:
                    self.texts[slot].append(int(token[i, slot]))

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def preempt(self, data):
        slot = data.draw(st.sampled_from(sorted(self.seated)))
        firsts = range(0, int(self.table().num_blocks[slot]), CHUNK // PAGE)
        pages = [self.d.read_pages(self.state, slot, first) for first in firsts]
        moved = jax.device_get((self.d.read_row(self.state, slot), pages))
        number = self.seated[slot][0]
        text = self.texts[slot]
        self.release_slot(slot)
        self.away.append((number, text, moved))

    @precondition(lambda self: self.away and len(self.seated) < SLOTS)
    @rule()
    def resume(self):
        number, text, (row, pages) = self.away[0]
        slot = self.free_slot()
        before = self.table()
        self.state, granted = self.d.write_row(self.state, slot, row)
        needed = -(-int(row["length"]) // PAGE)
        assert bool(granted) == (needed <= int(before.num_free))
        if not granted:
            assert same_bits(before, self.table())
            return
        for i, taken in enumerate(pages):
            self.state = self.d.write_pages(self.state, slot, i * (CHUNK // PAGE), taken)
        self.seated[slot], self.texts[slot] = (number, []), text
        del self.away[0]

    @precondition(lambda self: 0 < len(self.seated) < SLOTS)
    @rule(data=st.data())
    def fork(self, data):
        slot, into = data.draw(st.sampled_from(sorted(self.seated))), self.free_slot()
        self.state, granted = self.d.fork(self.state, slot, into)
        if granted:
            number, kept = self.seated[slot]
            self.prefixes.lock(kept)
            self.seated[into], self.texts[into] = (number, kept), list(self.texts[slot])

    @precondition(lambda self: self.seated)
    @rule(data=st.data())
    def release(self, data):
        self.release_slot(data.draw(st.sampled_from(sorted(self.seated))))

    def release_slot(self, slot):
        self.state = self.d.release(self.state, slot)
        self.prefixes.unlock(self.seated.pop(slot)[1])
        del self.texts[slot]

    @rule(count=st.integers(1, 8))
    def evict(self, count):
        gone = self.prefixes.evict(count)
        self.state = self.d.decrement(self.state, padded(gone, self.d.config.blocks_per_slot), len(gone))

    @invariant()
    def references_count_slots_and_kept_pages(self):
        table = self.table()
        held = np.zeros(POOL, int)
        for slot in range(SLOTS):
            mine = table.pages[slot, : table.num_blocks[slot]]
            assert len(set(mine.tolist())) == len(mine) and 0 not in mine
            assert slot in self.seated or len(mine) == 0
            held[mine] += 1
        held[list(self.prefixes._pages.values())] += 1
        np.testing.assert_array_equal(table.references, held)

    @invariant()
    def free_pages_are_those_nobody_holds(self):
        table = self.table()
        listed = table.free[: int(table.num_free)].tolist()
        assert sorted(listed) == [page for page in range(1, POOL) if table.references[page] == 0]

    @invariant()
    def the_null_page_is_never_written(self):
        for layer in self.state.plants[0].cache.layers:
            assert not np.asarray(layer.pages[:, 0]).any()

    @invariant()
    def every_text_is_the_one_it_is_alone(self):
        for slot, (number, _) in self.seated.items():
            text = self.texts[slot]
            assert tuple(text) == text_alone(number)[: len(text)]


Slots.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSlots = Slots.TestCase


@pytest.mark.parametrize("until_end", [False, True])
def test_a_burst_may_stop_when_a_sequence_ends(until_end):
    d = decoder()
    state = d.insert(d.empty(), 0, request(5, limit=2))
    state = d.insert(state, 1, request(6, limit=9))
    _, _, ran = d.decode((weights(),), state, 4, np.bool_(until_end))
    assert int(ran) == (2 if until_end else 4)


def test_what_is_refused_or_of_no_tokens_changes_nothing_and_a_fork_of_full_pages_needs_none():
    d, params = made("plain"), weights()
    state = fill(d, params, d.empty(), 0, prompt(4, 60))
    state = start(d, params, state, 1, prompt(5, 36))  # 35 tokens: the last of nine pages is partial
    assert int(state.table.num_free) == 0
    before = jax.tree.map(np.asarray, state)
    state, granted = d.fork(state, 1, 2)
    assert not granted and same_bits(state, before)
    for slot, tokens in ((2, range(CHUNK)), (1, [])):
        state, granted = d.prefill((params,), state, *pack(d.config, [(slot, tokens)]))
        assert granted.all() == (slot == 1) and same_bits(state, before)
    state = d.release(state, 1)
    state = start(d, params, state, 1, prompt(5, 33))  # 32 tokens: eight full pages
    state, granted = d.fork(state, 1, 2)
    assert granted and state.table.pages[2].tolist() == state.table.pages[1].tolist()


def test_a_fork_shares_pages_has_its_own_future_and_leaves_its_source_alone():
    """Of a prompt of 9 the cache holds 8 tokens; with 2 more the third page is half full."""
    d, params = made("plain"), weights()
    asked = dict(seed=8, limit=16)
    tokens = prompt(7, 9)
    undisturbed = text_of(d, params, 0, tokens, **asked)
    state = start(d, params, d.empty(), 0, tokens, **asked)
    state, before = run(d, params, state, 2)
    source = row_of(state, 0)
    length = int(state.length[0])
    state, granted = d.fork(state, 0, 2)
    assert granted and same_bits(row_of(state, 0), source)
    full = length // PAGE
    pages = np.asarray(state.table.pages)
    assert (pages[2, :full] == pages[0, :full]).all()
    assert np.asarray(state.table.references)[pages[0, :full]].tolist() == [2] * full
    assert pages[2, full] not in (0, pages[0, full])
    for layer in state.plants[0].cache.layers:
        used = slice(0, length % PAGE)
        np.testing.assert_array_equal(layer.pages[:, pages[2, full], used], layer.pages[:, pages[0, full], used])
        for leaf in jax.tree.leaves(layer.summary):
            np.testing.assert_array_equal(leaf[:, pages[2, full]], leaf[:, pages[0, full]])
    assert same_bits(jax.tree.map(lambda x: x[2], state.control), jax.tree.map(lambda x: x[0], state.control))
    state, rows = run(d, params, state)
    done = texts(before)[0]
    assert done + texts(rows)[0] == undisturbed
    assert len(texts(rows)[2]) == 14 and texts(rows)[2] != texts(rows)[0]

"""The page table against a plain model of who holds what, over any order of calls."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from et_jax.decode.cache import pages

SLOTS, BLOCKS, PAGES, MOST = 3, 4, 9, 2  # eight pages to hand out, twelve wanted at most

reserve = jax.jit(partial(pages.reserve, most=MOST))
release = jax.jit(pages.release)
adopt = jax.jit(pages.share)
hold = jax.jit(pages.increment)
drop = jax.jit(pages.decrement)
truncate = jax.jit(partial(pages.truncate, most=MOST))


def listed(some: list[int]) -> jnp.ndarray:
    return jnp.asarray([*some, *[0] * (BLOCKS - len(some))], jnp.int32)


class Pages(RuleBasedStateMachine):
    """Each slot is a list of pages; a page is free while no list has it."""

    def __init__(self):
        super().__init__()
        self.table = pages.empty(SLOTS, BLOCKS, PAGES)
        self.held: list[list[int]] = [[] for _ in range(SLOTS)]
        self.kept: list[int] = []  # held beyond the slots

    def free(self) -> set[int]:
        return set(range(1, PAGES)) - {page for pages in (*self.held, self.kept) for page in pages}

    @rule(wanted=st.lists(st.integers(0, BLOCKS), min_size=SLOTS, max_size=SLOTS))
    def reserve(self, wanted):
        before, num_free = self.table, len(self.free())
        self.table, granted = reserve(before, jnp.asarray(wanted, jnp.int32))
        table, blocked = np.asarray(self.table.pages), False
        for slot, blocks in enumerate(wanted):
            need = min(max(blocks - len(self.held[slot]), 0), MOST)
            blocked = blocked or need > num_free
            fits = need == 0 or not blocked
            assert bool(granted[slot]) == fits
            if fits:
                num_free -= need
                fresh = table[slot, len(self.held[slot]) : len(self.held[slot]) + need].tolist()
                assert set(fresh) <= self.free() and len(set(fresh)) == need
                self.held[slot] += fresh
        if not granted.any():
            same = zip(jax.tree.leaves(before), jax.tree.leaves(self.table), strict=True)
            assert all(np.array_equal(old, new) for old, new in same)

    @rule(slot=st.integers(0, SLOTS - 1))
    def release(self, slot):
        self.table = release(self.table, jnp.int32(slot))
        self.held[slot] = []

    @rule(surplus=st.lists(st.integers(0, MOST + 1), min_size=SLOTS, max_size=SLOTS))
    def truncate(self, surplus):
        """The last pages of several slots, as far as no other holds them."""
        given = []
        for slot, count in enumerate(surplus):
            own = self.held[slot]
            others = {page for pages in (*self.held[:slot], *self.held[slot + 1 :], self.kept) for page in pages}
            last = next((i for i, page in enumerate(reversed(own)) if page in others), len(own))
            given.append(min(count, last, MOST))
            self.held[slot] = own[: len(own) - given[-1]]
        self.table = truncate(self.table, jnp.asarray(given, jnp.int32))

    @precondition(lambda self: [] in self.held and any(self.held))
    @rule(data=st.data())
    def adopt(self, data):
        source = data.draw(st.sampled_from([slot for slot in range(SLOTS) if self.held[slot]]))
        into = data.draw(st.sampled_from([slot for slot in range(SLOTS) if not self.held[slot]]))
        blocks = data.draw(st.integers(0, len(self.held[source])))
        self.table = adopt(self.table, jnp.int32(into), self.table.pages[source], jnp.int32(blocks))
        self.held[into] = self.held[source][:blocks]

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def hold(self, data):
        source = data.draw(st.sampled_from([slot for slot in self.held if slot]))
        fresh = [page for page in source if page not in self.kept]
        self.table = hold(self.table, listed(fresh), jnp.int32(len(fresh)))
        self.kept += fresh

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data):
        count = data.draw(st.integers(1, min(BLOCKS, len(self.kept))))
        self.table = drop(self.table, listed(self.kept[:count]), jnp.int32(count))
        del self.kept[:count]

    @precondition(lambda self: self.kept and [] in self.held)
    @rule(data=st.data())
    def adopt_what_is_kept(self, data):
        into = data.draw(st.sampled_from([slot for slot in range(SLOTS) if not self.held[slot]]))
        count = data.draw(st.integers(1, min(BLOCKS, len(self.kept))))
        self.table = adopt(self.table, jnp.int32(into), listed(self.kept[:BLOCKS]), jnp.int32(count))
        self.held[into] = self.kept[:count]

    @invariant()
    def table_says_who_holds_what(self):
        table = np.asarray(self.table.pages)
        assert self.table.num_blocks.tolist() == [len(slot) for slot in self.held]
        for slot in range(SLOTS):
            assert table[slot].tolist() == self.held[slot] + [0] * (BLOCKS - len(self.held[slot]))

    @invariant()
    def references_count_the_holders(self):
        holders = [sum(page in pages for pages in (*self.held, self.kept)) for page in range(PAGES)]
        assert holders[0] == 0
        assert self.table.references.tolist() == holders

    @invariant()
    def free_pages_are_listed_once_and_the_null_page_never(self):
        num_free = int(self.table.num_free)
        listed = self.table.free[:num_free].tolist()
        assert len(listed) == len(set(listed)) and set(listed) == self.free()

    def teardown(self):
        for slot in range(SLOTS):
            self.release(slot)
        for page in self.kept:
            self.table = drop(self.table, listed([page]), jnp.int32(1))
        self.kept = []
        self.references_count_the_holders()
        self.free_pages_are_listed_once_and_the_null_page_never()
        assert int(self.table.num_free) == PAGES - 1


Pages.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestPages = Pages.TestCase

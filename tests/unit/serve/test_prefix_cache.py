"""The prefix index against a plain dictionary of what each page holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from et_jax.serve.prefix_cache import PrefixCache

SIZE = 2
prompts = st.lists(st.integers(0, 1), max_size=11)  # few tokens, so that many prompts begin alike


class Prefixes(RuleBasedStateMachine):
    """A page holds what its prompt began with, up to its own last token."""

    def __init__(self):
        super().__init__()
        self.index = PrefixCache(SIZE)
        self.holds: dict[int, tuple[int, ...]] = {}
        self.used: list[list[int]] = []
        self.next_page = 1

    @rule(tokens=prompts, most=st.integers(0, 5))
    def find(self, tokens, most):
        found = self.index.find(tokens, most)
        beginnings = [tuple(tokens[: SIZE * (i + 1)]) for i in range(len(tokens) // SIZE)][:most]
        assert [self.holds[page] for page in found] == beginnings[: len(found)]
        if len(found) < len(beginnings):
            assert beginnings[len(found)] not in self.holds.values()

    @rule(tokens=prompts, most=st.integers(0, 5))
    def prompt_comes(self, tokens, most):
        """What an engine does: find, use, compute the rest on fresh pages, keep those, use them."""
        found = self.index.find(tokens, most)
        self.index.lock(found)
        num_fresh = len(tokens) // SIZE - len(found)
        pages = found + list(range(self.next_page, self.next_page + num_fresh))
        self.next_page += num_fresh
        fresh = self.index.add(tokens[: SIZE * (len(tokens) // SIZE)], pages)
        assert not set(fresh) & set(self.holds) and set(fresh) <= set(pages)
        for page in fresh:
            self.holds[page] = tuple(tokens[: SIZE * (pages.index(page) + 1)])
        self.index.lock(fresh)
        self.used.append(found + fresh)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def prompt_leaves(self, data):
        self.index.unlock(self.used.pop(data.draw(st.integers(0, len(self.used) - 1))))

    @rule(count=st.integers(0, 6))
    def evict(self, count):
        in_use = {page for pages in self.used for page in pages}
        gone = self.index.evict(count)
        assert len(gone) == len(set(gone)) == min(count, len(self.holds) - len(in_use))
        assert not set(gone) & in_use
        for page in gone:
            del self.holds[page]

    @invariant()
    def counts_agree(self):
        in_use = {page for pages in self.used for page in pages}
        assert len(self.index) == len(self.holds)
        assert self.index.num_idle == len(self.holds) - len(in_use)
        assert len(set(self.holds.values())) == len(self.holds)


Prefixes.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPrefixes = Prefixes.TestCase


def kept(index: PrefixCache, tokens: list[int], pages: list[int]) -> None:
    assert index.add(tokens, pages) == pages


def test_the_least_recently_used_goes_first_and_its_end_before_its_beginning():
    index = PrefixCache(1)
    kept(index, [1, 2], [10, 11])
    kept(index, [3], [12])
    assert index.find([1], 9) == [10]
    index.lock([10, 11])
    index.lock([10])
    assert index.num_shared([10, 11]) == 1
    index.unlock([10])
    index.unlock([10, 11])
    assert [index.evict(1) for _ in range(3)] == [[11], [12], [10]]

"""What is admitted and what is preempted: none is overtaken for being large, none waits for ever, one always stays."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from et_jax.serve.scheduler import AGING_SECONDS, admitted, preempted, rank, urgency

NOW = 1e5
seconds = st.floats(0, 1e4, allow_subnormal=False)
priorities = st.floats(-5, 5, allow_subnormal=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class One:
    """A sequence as the scheduler sees it, with as many pages as it has tokens."""

    arrival: int = 0
    priority: float = 0.0
    deadline: float | None = None
    arrived: float = NOW
    num_tokens: int = 1
    resumes: bool = False
    slot: int | None = None
    turn: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """A page a token."""

    num_available: int = 0
    freed: tuple[int, ...] = ()

    def pages_for(self, num_tokens: int) -> int:
        return num_tokens

    def num_freed(self, slot: int) -> int:
        return self.freed[slot]


waiting = st.builds(
    One,
    arrival=st.integers(0, 1000),
    priority=priorities,
    deadline=st.none() | st.floats(1e-3, 1e4),
    arrived=seconds.map(lambda waited: NOW - waited),
    num_tokens=st.integers(1, 12),
    resumes=st.booleans(),
)


def place(queue: list[One], num_slots: int, num_pages: int, num_running: int) -> list[One]:
    return admitted(queue, Pages(num_available=num_pages), now=NOW, num_slots=num_slots, num_running=num_running)


@given(st.lists(waiting, max_size=12), st.integers(0, 6), st.integers(0, 30), st.integers(0, 6))
def test_the_admitted_fit_and_the_first_left_out_does_not(queue, num_slots, num_pages, num_running):
    chosen = place(queue, num_slots, num_pages, num_running)
    left = [one for one in queue if not any(one is other for other in chosen)]
    assert len(chosen) <= num_slots and len(left) + len(chosen) == len(queue)
    taken = sum(one.num_tokens for one in chosen)
    assert not chosen or taken + num_running + len(chosen) - 1 <= num_pages
    ranks, behind = [rank(one, NOW) for one in chosen], sorted(rank(one, NOW) for one in left)
    assert ranks == sorted(ranks) and (not chosen or not left or ranks[-1] <= behind[0])
    if left and len(chosen) < num_slots:  # the next in line needs more than there is
        pages = [one.num_tokens for one in left if rank(one, NOW) == behind[0]]
        assert min(pages) + taken + num_running + len(chosen) > num_pages or max(pages) != min(pages)


def test_who_is_admitted_first():
    equals = [One(arrival=2), One(arrival=0), One(arrival=1)]
    assert place(equals, 2, 100, 0) == [equals[1], equals[2]]
    resuming = [One(priority=9.0), One(arrival=5, resumes=True), One(arrival=3, resumes=True)]
    assert place(resuming, 3, 100, 0) == resuming[::-1]
    assert place([One(num_tokens=8), One(arrival=1)], 2, 7, 0) == []  # a large one holds back those behind it


@given(priorities, priorities, seconds)
def test_a_wait_outweighs_any_difference_of_priority(low, high, ahead):
    """The bound of `rank`: one that comes that much later than a request is never admitted before it."""
    low, high = min(low, high), max(low, high)
    ahead += (high - low + 1) * AGING_SECONDS * (1 + 1e-9) + 1e-6
    early, late = One(priority=low, arrived=-ahead), One(arrival=1, priority=high, arrived=0.0, deadline=1e-9)
    assert rank(early, 0.0) < rank(late, 0.0)
    plain = One(arrival=1, priority=high, arrived=0.0)
    assert rank(plain, 0.0) < rank(early, 0.0) or ahead > (high - low) * AGING_SECONDS


def test_urgency_rises_to_one_more_at_the_deadline_and_no_further():
    assert [urgency(2.0, 10.0, waited) for waited in (0.0, 5.0, 10.0, 1e6)] == [2.0, 2.5, 3.0, 3.0]
    assert urgency(2.0, None, 1e6) == 2.0
    hurried = One(arrival=1, deadline=10.0, arrived=NOW - 5)
    assert place([One(arrived=NOW - 5), hurried], 1, 9, 0) == [hurried]


def evicted(turns: list[int], priority: list[float], freed: list[int], short: int) -> list[int]:
    """Return the slots that are given up, where every slot is taken."""
    running = [One(slot=slot, turn=turn) for slot, turn in enumerate(turns)]
    chosen = preempted(running, Pages(freed=tuple(freed)), dict(enumerate(priority)), short)
    return [one.slot for one in chosen if one.slot is not None]


slots = st.lists(st.tuples(st.integers(0, 1000), priorities, st.integers(0, 12)), min_size=1, max_size=8)


@given(slots, st.integers(-3, 40))
def test_the_least_are_preempted_until_it_is_enough_and_the_highest_never(slots, short):
    turns, priority, freed = (list(column) for column in zip(*slots, strict=True))
    chosen = evicted(turns, priority, freed, short)
    stays = [slot for slot in range(len(slots)) if slot not in chosen]
    assert stays and len(set(chosen)) == len(chosen)

    def key(slot: int) -> tuple[float, int]:
        return priority[slot], -turns[slot]

    assert all(key(i) <= key(j) for i in chosen for j in stays)
    gained = [freed[slot] for slot in chosen]
    assert sum(gained[:-1]) < max(short, 1) if chosen else short <= 0 or len(slots) == 1
    assert sum(gained) >= short or len(stays) == 1
    assert evicted([3, 7, 5], [-math.inf] * 3, [1, 1, 1], 2) == [1, 2]  # of equals the last to be admitted

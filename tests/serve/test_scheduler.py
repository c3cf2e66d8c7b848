"""Who is seated and who leaves: no one is overtaken for being large, no one waits for ever, somebody always stays."""

import math

from hypothesis import given
from hypothesis import strategies as st

from et_jax.serve.scheduler import AGING_SECONDS, Running, Waiting, admitted, preempted, rank, urgency

seconds = st.floats(0, 1e4, allow_subnormal=False)
priorities = st.floats(-5, 5, allow_subnormal=False)
waiting = st.builds(
    Waiting,
    arrival=st.integers(0, 1000),
    priority=priorities,
    deadline=st.none() | st.floats(1e-3, 1e4),
    waited=seconds,
    pages=st.integers(1, 12),
    started=st.booleans(),
)
running = st.builds(Running, arrival=st.integers(0, 1000), priority=priorities, pages=st.integers(0, 12))


def one(arrival: int = 0, **changes) -> Waiting:
    plain = dict(priority=0.0, deadline=None, waited=0.0, pages=1, started=False)
    return Waiting(arrival=arrival, **plain | changes)


@given(st.lists(waiting, max_size=12), st.integers(0, 6), st.integers(0, 30), st.integers(0, 6))
def test_the_seated_fit_and_the_first_left_out_does_not(queue, num_slots, num_pages, num_running):
    chosen = admitted(queue, num_slots, num_pages, num_running)
    assert len(chosen) == len(set(chosen)) <= num_slots
    taken = sum(queue[i].pages for i in chosen)
    assert not chosen or taken + num_running + len(chosen) - 1 <= num_pages
    ranks = [rank(queue[i]) for i in chosen]
    left = sorted(rank(queue[i]) for i in range(len(queue)) if i not in chosen)
    assert ranks == sorted(ranks) and (not chosen or not left or ranks[-1] <= left[0])
    if left and len(chosen) < num_slots:  # the next in line needs more than there is
        pages = [queue[i].pages for i in range(len(queue)) if i not in chosen and rank(queue[i]) == left[0]]
        assert min(pages) + taken + num_running + len(chosen) > num_pages or max(pages) != min(pages)


def test_equals_are_served_in_the_order_they_came():
    assert admitted([one(2), one(0), one(1)], 2, 100, 0) == [1, 2]


def test_those_who_had_to_leave_come_first():
    assert admitted([one(0, priority=9.0), one(5, started=True), one(3, started=True)], 3, 100, 0) == [2, 1, 0]


def test_a_large_one_holds_back_the_small_ones_behind_it():
    assert admitted([one(0, pages=8), one(1)], 2, 7, 0) == []


def test_a_page_is_left_for_everybody_seated():
    assert admitted([one(0, pages=3)], 1, 5, 2) == [0] and admitted([one(0, pages=3)], 1, 5, 3) == []


@given(priorities, priorities, seconds)
def test_a_wait_outweighs_any_difference_of_priority(low, high, ahead):
    """The bound of `rank`: who comes that much later than a request is never seated before it."""
    low, high = min(low, high), max(low, high)
    ahead += (high - low + 1) * AGING_SECONDS * (1 + 1e-9) + 1e-6
    early, late = one(0, priority=low, waited=ahead), one(1, priority=high, waited=0.0, deadline=1e-9)
    assert rank(early) < rank(late)
    assert rank(one(1, priority=high, waited=0.0)) < rank(early) or ahead > (high - low) * AGING_SECONDS


def test_urgency_rises_to_one_more_at_the_deadline_and_no_further():
    assert [urgency(2.0, 10.0, waited) for waited in (0.0, 5.0, 10.0, 1e6)] == [2.0, 2.5, 3.0, 3.0]
    assert urgency(2.0, None, 1e6) == 2.0
    assert admitted([one(0), one(1, deadline=10.0, waited=5.0)], 1, 9, 0) == [1]


@given(st.lists(running, min_size=1, max_size=8), st.integers(-3, 40))
def test_the_least_leave_until_it_is_enough_and_the_highest_never(slots, num_pages):
    chosen = preempted(slots, num_pages)
    stays = [i for i in range(len(slots)) if i not in chosen]
    assert stays and len(set(chosen)) == len(chosen)

    def key(i):
        return slots[i].priority, -slots[i].arrival

    assert all(key(i) <= key(j) for i in chosen for j in stays)
    freed = [slots[i].pages for i in chosen]
    assert sum(freed[:-1]) < max(num_pages, 1) if chosen else num_pages <= 0 or len(slots) == 1
    assert sum(freed) >= num_pages or len(stays) == 1


def test_of_equals_the_last_to_come_leaves():
    slots = [Running(arrival=i, priority=-math.inf, pages=1) for i in (3, 7, 5)]
    assert preempted(slots, 2) == [1, 2]

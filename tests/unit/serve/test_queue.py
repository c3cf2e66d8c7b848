"""One line before several replicas: shared out evenly, in order, and numbered once."""

import pytest
from plain_sequences import sequence

from et_jax.serve.memory.page_pool import PagePool
from et_jax.serve.queue import Queue
from et_jax.serve.sequence import Sequence, Status


@pytest.fixture
def pool():
    return PagePool(num_pages=101, page_size=4, chunk=4, cache_prefixes=False)


def submitted(queue: Queue, count: int) -> list[Sequence]:
    made = [sequence([1, 2]) for _ in range(count)]
    for one in made:
        queue.submit(one, lambda _: None)
    return made


def test_those_that_wait_are_shared_out_evenly_and_in_order(pool):
    queue, here, there = Queue(), [], []
    queue.join(here)
    queue.join(there)
    first, *_ = submitted(queue, 7)

    def admit(running: list, free: int) -> list[int]:
        came = queue.admit(len(running), free, pool)
        running += came
        return [one.arrival for one in came]

    assert admit(here, 16) == [0, 1, 2, 3]  # half of seven, rounded up
    assert admit(here, 12) == []
    assert admit(there, 2) == [4, 5]
    here.remove(first)
    assert admit(here, 13) == []  # the other has fewer
    assert admit(there, 1) == [6]
    assert [one.turn for one in (*here, *there)] == [1, 2, 3, 4, 5, 6] and not queue.waiting


def test_one_that_comes_back_keeps_its_turn_and_goes_first(pool):
    queue, running = Queue(), []
    queue.join(running)
    first, second = submitted(queue, 2)
    assert queue.admit(0, 1, pool) == [first]
    since, first.status = first.admitted, Status.SWAPPED
    queue.waiting.append(first)
    assert queue.admit(0, 2, pool) == [first, second]
    assert (first.turn, second.turn) == (0, 1) and first.admitted == since
    few = PagePool(num_pages=3, page_size=1, chunk=1, cache_prefixes=False)
    waiting = submitted(queue, 2)
    assert queue.admit(0, 2, few) == waiting[:1] and queue.waiting == waiting[1:]  # the other has no pages

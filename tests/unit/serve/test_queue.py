"""One line before several replicas, shared out evenly and in order, and one caller's events: all, and few under way."""

import itertools

import pytest
from plain_sequences import row, sequence

from et_jax.serve.memory.page_pool import PagePool
from et_jax.serve.prompts import refused
from et_jax.serve.queue import Queue
from et_jax.serve.replicas import Replicas
from et_jax.serve.sequence import Sequence, Status
from et_jax.serve.streams import serve
from et_jax.serve.use import Use


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


class Paper(Replicas):
    """Gives the first sequence in the line its next token at every round, and ends those that nobody wants."""

    def __init__(self) -> None:
        self.queue, self.replicas, self.use = Queue(), [], Use("paper")
        self.most = 0

    def advance(self, unless) -> None:
        if unless():
            return
        self.most = max(self.most, len(self.queue.waiting))
        self.end_abandoned()
        if unless():
            return
        one = self.queue.waiting[0]
        event = one.take(row(40 + len(one.trace)), len(one.trace) + 1 == one.limit)
        if event.completion is not None:
            self.queue.waiting.remove(one)
        one.deliver(event)

    def end_abandoned(self) -> None:
        for one in [one for one in self.queue.waiting if one.abandoned]:
            self.queue.waiting.remove(one)
            one.deliver(one.end("abort"))


def test_every_sequence_ends_once_and_few_are_under_way():
    replicas, refusal = Paper(), refused(7, None, "It cannot be.")
    asked = [sequence([5, 6], limit=3) for _ in range(5)]
    passed_on, *events = list(serve(replicas, [refusal, *asked], ahead=2))
    assert passed_on is refusal
    ends = [event.completion for event in events if event.completion is not None]
    assert len(ends) == 5 and all(end.finish_reason == "length" and len(end.token_ids) == 3 for end in ends)
    assert len(events) == 15 and replicas.most == 2 and not replicas.queue.waiting


def test_sequences_are_taken_as_they_are_needed():
    replicas = Paper()
    events = serve(replicas, (sequence([5], limit=1) for _ in itertools.count()), ahead=4)
    assert len(list(itertools.islice(events, 20))) == 20
    events.close()
    replicas.end_abandoned()
    assert not replicas.queue.waiting

"""One caller's events: all of them, in order, no more sequences under way than asked, nothing left behind."""

import itertools

import pytest
from plain_sequences import row, sequence

from et_jax.serve.prompts import refused
from et_jax.serve.queue import Queue
from et_jax.serve.replicas import Replicas
from et_jax.serve.sequence import Sequence
from et_jax.serve.streams import Call, serve


class Paper(Replicas):
    """Gives the first sequence in the line its next token at every round, or cancels."""

    def __init__(self) -> None:
        self.queue, self.replicas = Queue(), []
        self.most = 0

    def advance(self, unless) -> None:
        if unless():
            return
        self.most = max(self.most, len(self.queue.waiting))
        one = self.queue.waiting[0]
        event = one.take(row(40 + len(one.trace)), len(one.trace) + 1 == one.limit)
        if event.completion is not None:
            self.queue.waiting.remove(one)
        one.deliver(event)

    def cancel(self, sequences) -> None:
        for one in sequences:
            self.queue.waiting.remove(one)
            one.deliver(one.end("abort"))


@pytest.fixture
def replicas():
    return Paper()


def asked(count: int, limit: int = 3) -> list[Sequence]:
    return [sequence([5, 6], limit=limit) for _ in range(count)]


def test_every_sequence_ends_once_and_few_are_under_way(replicas):
    events = list(serve(replicas, asked(5), ahead=2))
    ends = [event.completion for event in events if event.completion is not None]
    assert len(ends) == 5 and all(end.finish_reason == "length" and len(end.token_ids) == 3 for end in ends)
    assert len(events) == 15 and replicas.most == 2 and not replicas.queue.waiting


def test_sequences_are_taken_as_they_are_needed(replicas):
    events = serve(replicas, (sequence([5], limit=1) for _ in itertools.count()), ahead=4)
    assert len(list(itertools.islice(events, 20))) == 20
    events.close()
    assert not replicas.queue.waiting


def test_an_event_among_what_is_asked_is_passed_on(replicas):
    refusal = refused(7, None, "It cannot be.")
    one, *_, last = list(serve(replicas, [refusal, *asked(1)], ahead=1))
    assert one is refusal and last.completion is not None and last.completion.error is None


def test_what_is_cancelled_ends_with_what_it_has(replicas):
    seen = []
    for event in serve(replicas, asked(3, limit=9), ahead=9, cancelled=lambda: len(seen) >= 4):
        seen.append(event)
    ends = [event.completion for event in seen if event.completion is not None]
    assert [len(end.token_ids) for end in ends] == [4, 0, 0] and {end.finish_reason for end in ends} == {"abort"}
    assert not replicas.queue.waiting


def test_a_stream_that_is_closed_leaves_nothing_under_way(replicas):
    events = serve(replicas, asked(3), ahead=9)
    next(events)
    events.close()
    assert not replicas.queue.waiting


def test_a_broken_replica_is_not_asked_to_cancel(replicas, monkeypatch):
    call = Call(replicas)
    call.submit(*asked(1))
    monkeypatch.setattr(Paper, "broken", True)
    call.cancel()
    assert call.under_way == replicas.queue.waiting

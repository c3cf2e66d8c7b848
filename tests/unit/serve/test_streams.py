"""One caller's events: all of them, in order, no more sequences under way than asked, nothing left behind."""

import itertools

import pytest
from plain_sequences import row, sequence

from et_jax.serve.prompts import refused
from et_jax.serve.queue import Queue
from et_jax.serve.replicas import Replicas
from et_jax.serve.sequence import Sequence
from et_jax.serve.streams import serve
from et_jax.serve.use import Use


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


@pytest.fixture
def replicas():
    return Paper()


def asked(count: int, limit: int = 3) -> list[Sequence]:
    return [sequence([5, 6], limit=limit) for _ in range(count)]


def test_every_sequence_ends_once_and_few_are_under_way(replicas):
    refusal = refused(7, None, "It cannot be.")
    passed_on, *events = list(serve(replicas, [refusal, *asked(5)], ahead=2))
    assert passed_on is refusal
    ends = [event.completion for event in events if event.completion is not None]
    assert len(ends) == 5 and all(end.finish_reason == "length" and len(end.token_ids) == 3 for end in ends)
    assert len(events) == 15 and replicas.most == 2 and not replicas.queue.waiting


def test_sequences_are_taken_as_they_are_needed(replicas):
    events = serve(replicas, (sequence([5], limit=1) for _ in itertools.count()), ahead=4)
    assert len(list(itertools.islice(events, 20))) == 20
    events.close()
    replicas.end_abandoned()
    assert not replicas.queue.waiting

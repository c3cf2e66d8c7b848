"""`best_of`: more continuations of a prompt are sampled than are returned, and the likeliest ones are kept."""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterable, Iterator

from et_jax.serve.completions import Completion, TokenEvent
from et_jax.serve.sequence import Sequence


class BestOf:
    """The requests of a call with `best_of`, and the events of their sequences that have not ended."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}  # by prompt index, the number of continuations to return
        self._sampled: dict[int, int] = {}
        self._events: dict[int, list[TokenEvent]] = {}

    def watched(self, sequences: Iterable[Sequence | TokenEvent]) -> Iterator[Sequence | TokenEvent]:
        """Yield the sequences of a call, and remember which of them belong to requests with `best_of`."""
        for one in sequences:
            if isinstance(one, Sequence) and one.request.params.sampled > one.request.params.n:
                self._asked[one.prompt_index] = one.request.params.n
                self._sampled[one.prompt_index] = one.request.params.sampled
            yield one

    def chosen(self, events: Generator[TokenEvent]) -> Generator[TokenEvent]:
        """Yield events; those of a request with `best_of` once all its sequences have ended, of the best ones alone."""
        with contextlib.closing(events):
            for event in events:
                if (number := event.prompt_index) not in self._asked:
                    yield event
                    continue
                waiting = self._events.setdefault(number, [])
                waiting.append(event)
                ended = [one.completion for one in waiting if one.completion is not None]
                if len(ended) == self._sampled[number]:
                    yield from _of(waiting, best(ended, self._asked[number]))
                    del self._asked[number], self._sampled[number], self._events[number]


def best(completions: list[Completion], n: int) -> list[Completion]:
    """Return the n completions with the greatest mean log-probability of their tokens, the best first.

    The model's own distribution counts, at temperature 1. A failed completion stands before all others, and one without
    tokens behind them.
    """

    def rank(one: Completion) -> tuple[bool, float]:
        mean = math.fsum(one.logprobs) / len(one.logprobs) if one.logprobs else -math.inf
        return one.error is None, -mean

    return sorted(completions, key=rank)[:n]


def _of(events: list[TokenEvent], completions: list[Completion]) -> Iterator[TokenEvent]:
    """Yield the events of some completions, which are numbered by their order."""
    for index, completion in enumerate(completions):
        for event in events:
            if event.index == completion.index:
                ended = None if event.completion is None else dataclasses.replace(event.completion, index=index)
                yield dataclasses.replace(event, index=index, completion=ended)

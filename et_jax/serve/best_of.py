"""`best_of`: more continuations of a prompt are sampled than are returned, and the likeliest ones are kept."""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterable, Iterator

from et_jax.serve.completions import Completion, TokenEvent, Unreturned
from et_jax.serve.requests import SamplingParams
from et_jax.serve.sequence import Sequence


class BestOf:
    """The requests of a call with `best_of`, and the events of their sequences that have not ended."""

    def __init__(self) -> None:
        self._asked: dict[int, SamplingParams] = {}  # by prompt index
        self._events: dict[int, list[TokenEvent]] = {}

    def watched(self, sequences: Iterable[Sequence | TokenEvent]) -> Iterator[Sequence | TokenEvent]:
        """Yield the sequences of a call, and remember which of them belong to requests with `best_of`."""
        for one in sequences:
            if isinstance(one, Sequence) and one.request.params.sampled > one.request.params.n:
                self._asked[one.prompt_index] = one.request.params
            yield one

    def chosen(self, events: Generator[TokenEvent]) -> Generator[TokenEvent]:
        """Yield events; those of a request with `best_of` once all its sequences have ended, of the best ones alone.

        If the call is cancelled before it submits all of them, the best of the submitted ones count.
        """
        with contextlib.closing(events):
            for event in events:
                if (number := event.prompt_index) not in self._asked:
                    yield event
                    continue
                waiting = self._events.setdefault(number, [])
                waiting.append(event)
                if sum(one.completion is not None for one in waiting) == self._asked[number].sampled:
                    yield from self._best(number)
            for number in list(self._events):
                yield from self._best(number)

    def _best(self, number: int) -> Iterator[TokenEvent]:
        """Yield the events of the best completions of a request, numbered by their order, and forget the request.

        The completions share the cost of the others.
        """
        events, n = self._events.pop(number), self._asked.pop(number).n
        ended = [event.completion for event in events if event.completion is not None]
        chosen, share = best(ended, n), None
        if others := [one for one in ended if one not in chosen]:
            cost, flops = math.fsum(one.cost for one in others), math.fsum(one.flops for one in others)
            share = Unreturned(cost=cost / len(chosen), flops=flops / len(chosen))
        for index, completion in enumerate(chosen):
            last = dataclasses.replace(completion, index=index, unreturned=share)
            for event in events:
                if event.index == completion.index:
                    yield dataclasses.replace(event, index=index, completion=last if event.completion else None)


def best(completions: list[Completion], n: int) -> list[Completion]:
    """Return the n completions with the greatest mean log-probability of their tokens, the best first.

    The model's own distribution counts, at temperature 1. A failed completion stands before all others, and one without
    tokens behind them.
    """

    def rank(one: Completion) -> tuple[bool, float]:
        mean = math.fsum(one.logprobs) / len(one.logprobs) if one.logprobs else -math.inf
        return one.error is None, -mean

    return sorted(completions, key=rank)[:n]

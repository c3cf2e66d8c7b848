"""Runs entries through a model: each becomes a request, and its result is reported once."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from et_jax.batch.tasks import Defaults, Entry, Task, read_task
from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.metrics import Metrics
from et_jax.serve.requests import GenerationRequest
from et_jax.serve.scoring import Score


@runtime_checkable
class Serving(Protocol):
    """The part of a model that a job requires, see `engine.Model`."""

    name: str
    tokenizer: Any
    metrics: Metrics

    def as_completed(
        self, requests: Iterable[GenerationRequest], *, control: Any = None, cancelled: Callable[[], bool] = ...
    ) -> Iterator[tuple[int, Completion]]: ...
    def score(self, texts: Any) -> list[Score]: ...


def serve_entries(
    model: Serving,
    entries: Iterable[Entry],
    defaults: Defaults,
    *,
    ended: Callable[[Task, list[Completion]], None],
    refused: Callable[[Entry, str], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Complete entries, taken lazily, and report the result of each once.

    `ended` receives the completions of a task: all `n`, or up to the first with an error. `refused` receives an invalid
    entry and its error message. Once `cancelled` returns True, running requests end early, as "abort".
    """
    under_way: dict[int, tuple[Task, list[Completion]]] = {}

    def requests() -> Iterator[GenerationRequest]:
        count = 0
        for entry in entries:
            try:
                task = read_task(entry, model.tokenizer, defaults)
            except UsageError as error:
                refused(entry, str(error))
                continue
            under_way[count] = (task, [])
            count += 1
            yield task.request

    for index, completion in model.as_completed(requests(), cancelled=cancelled):
        if index not in under_way:  # a sibling failed, and the line has its error row
            continue
        task, completions = under_way[index]
        completions.append(completion)
        if len(completions) == task.request.params.n or completion.error is not None:
            del under_way[index]
            if task.scores_prompt and completion.error is None:
                [score] = model.score([task.request.prompt])
                task = dataclasses.replace(task, prompt_score=score)
            ended(task, completions)
    if under_way and not cancelled():
        raise RuntimeError(f"the engine left {len(under_way)} requests unanswered")

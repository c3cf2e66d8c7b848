"""The actors: one engine each, which serves several blocks at once, so that its slots stay full from block to block."""

import asyncio
import dataclasses
import importlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from et_jax.batch.parquet import plain
from et_jax.batch.ray import cluster
from et_jax.batch.serving import Serving, serve_entries
from et_jax.batch.table import kinds
from et_jax.batch.tasks import SETTINGS, Defaults, Entry, Task
from et_jax.errors import UsageError
from et_jax.io import values
from et_jax.serve.completions import Completion
from et_jax.serve.config import EngineConfig
from et_jax.serve.engine import load
from et_jax.serve.requests import SamplingParams
from et_jax.serve.totals import Totals

R = TypeVar("R")

BLOCKS = 4  # that an engine serves at once
_WAITING = 2  # more that lie ready beside it
_LEAST_ROWS = 16  # of a block: what Ray does for each costs milliseconds
_THREADS = 64
_ONE_TEXT = {"n", "logprobs", "top_logprobs"}  # settings for which a row of a dataset has no place
_COUNTS = ("prompt_tokens", "completion_tokens")
COLUMNS = ("text", "finish_reason", *_COUNTS, "seed", "entropic", "error")
"""The columns that decoding adds; an existing `seed` column is unchanged."""


def ready(config: EngineConfig) -> Serving:
    """Return the model of a configuration, with every program compiled."""
    model = load(**config.given)
    model.warm_up()
    return model


def rows_of_block(config: EngineConfig) -> int:
    """Return the rows of a block, so many that `BLOCKS` blocks fill the slots several times."""
    return max(_LEAST_ROWS, 2 * config.max_num_seqs * config.replicas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of an entry: completions of a task, or an error with code and message."""

    entry: Entry
    task: Task | None = None
    completions: Sequence[Completion] = ()
    error: tuple[str, str] | None = None


class Engine:
    """One engine of `config` in an actor, on the devices and cores that Ray has given the actor.

    When it has no block left it prints its rows, tokens and nats per second, and the share of idle slots.
    """

    def __init__(
        self, config: EngineConfig, defaults: Defaults, *, load: Callable[[EngineConfig], Serving] = ready
    ) -> None:
        cluster.settle(cluster.ray().get_runtime_context().get_assigned_resources())
        self.model, self.defaults = load(config), defaults
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="et_jax blocks")
        self._blocks, self._began, self._seconds = 0, 0.0, 0.0
        self._rows = self._tokens = 0
        self._nats = 0.0

    async def within(self, serve: Callable[[Any], R], block: Any) -> R:
        """Return the results of a block, decoded in a separate thread concurrently with other blocks."""
        if not self._blocks:
            self._began = time.monotonic()
        self._blocks += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, serve, block)
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._seconds += time.monotonic() - self._began
                print(self.summary(), flush=True)

    def answers(self, entries: Sequence[Entry]) -> list[Answer]:
        """Decode the entries of a block; return the result of each, in the order in which they ended."""
        found: list[Answer] = []

        def ended(task: Task, completions: list[Completion]) -> None:
            errors = [("failed", one.error) for one in completions if one.error is not None]
            found.append(
                Answer(entry=task.entry, task=task, completions=completions, error=errors[0] if errors else None)
            )

        def refused(entry: Entry, message: str) -> None:
            found.append(Answer(entry=entry, error=("invalid_request", message)))

        serve_entries(self.model, entries, self.defaults, ended=ended, refused=refused)
        self._rows += len(found)
        for one in found:
            self._tokens += sum(len(completion.token_ids) for completion in one.completions)
            self._nats += sum(completion.entropic_time for completion in one.completions)
        return found

    def summary(self) -> str:
        """Return a readable summary of the engine's work so far."""
        metrics, seconds = self.model.metrics, max(self._seconds, 1e-9)
        idle = idle_share(metrics.step_rows, metrics.idle_rows)
        return (
            f"[engine {os.getpid()}: {self._rows} rows, {self._tokens} tokens in {self._seconds:.1f} s, "
            f"{self._tokens / seconds:.1f} tokens/s, {self._nats / seconds:.1f} nats/s{idle}]"
        )


def idle_share(rows: int, idle: int) -> str:
    """Return a phrase on the share of idle slots, empty if no rows were counted."""
    return f"; {100 * idle / rows:.1f}% of slots idle" if rows else ""


class Decoder(Engine):
    """Decodes a column of a dataset, for `dataset.map_batches(Decoder, batch_format="pyarrow", ...)`; see `decode`.

    Its constructor takes the arguments of `decode` of the same names; `load` makes the model of a configuration.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        prompt: str = "prompt",
        id: str = "custom_id",
        defaults: Defaults | None = None,
        load: Callable[[EngineConfig], Serving] = ready,
    ) -> None:
        super().__init__(config, defaults or Defaults(params=SamplingParams()), load=load)
        self._prompt, self._id = prompt, id

    async def __call__(self, batch: Any) -> AsyncIterator[Any]:
        yield await self.within(self._decoded, batch)

    def _decoded(self, table: Any) -> Any:
        """Return a table with the columns of the results added."""
        arrow = importlib.import_module("pyarrow")
        if not isinstance(table, arrow.Table):
            raise UsageError('Decoder takes tables of Arrow; give map_batches batch_format="pyarrow".')
        names = table.column_names
        if self._prompt not in names:
            raise UsageError(f"The dataset has no column {self._prompt}; name that of the prompts with prompt=...")
        if taken := sorted((set(COLUMNS) - {"seed"}) & set(names)):
            raise UsageError(f"The dataset has a column {taken[0]}, which decoding writes; rename it.")
        rows = table.to_pylist()
        found = {one.entry.line: one for one in self.answers([self._entry(i, row) for i, row in enumerate(rows)])}
        values_of = [self._values(found[i]) for i in range(len(rows))]
        for name, kind in kinds(arrow, COLUMNS, (*_COUNTS, "seed")).items():
            column = arrow.array([row[name] for row in values_of], type=kind)
            place = names.index(name) if name in names else None
            table = table.append_column(name, column) if place is None else table.set_column(place, name, column)
        return table

    def _entry(self, number: int, row: Mapping[str, Any]) -> Entry:
        """Return a row as the equivalent line of a batch file."""
        given, problem = {}, None
        try:
            given = {name: plain(value) for name, value in row.items() if name in SETTINGS | {self._prompt, self._id}}
            given = {name: value for name, value in given.items() if value is not None}
            if unplaced := sorted(name for name in _ONE_TEXT & given.keys() if (name, given[name]) != ("n", 1)):
                problem = f"{unplaced[0]} has no place here, for a row has one text alone; rename or drop the column."
        except ValueError as error:
            problem = f"The row has no form in JSON ({error}); correct it."
        name, prompt = given.pop(self._id, None), given.pop(self._prompt, None)
        turns = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        line = {**given, "messages" if turns else "prompt": prompt}
        return Entry(
            line=number, custom_id=None if name is None else str(name), id=str(number), values=line, problem=problem
        )

    def _values(self, answer: Answer) -> dict[str, Any]:
        """Return the values of the columns that are added."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        if answer.task is not None:
            row["seed"] = answer.task.request.params.seed
        if answer.error is None:
            [one] = answer.completions
            row |= {"text": one.text, "finish_reason": one.finish_reason}
            row |= {"prompt_tokens": one.prompt_tokens, "completion_tokens": len(one.token_ids)}
            row["entropic"] = Totals.of([one]).to_dict()
        else:
            name = answer.entry.custom_id
            row["error"] = answer.error[1] if name is None else f"{values.excerpt(name)}: {answer.error[1]}"
        return row


def decode(
    dataset: Any,
    config: EngineConfig,
    *,
    prompt: str = "prompt",
    id: str = "custom_id",
    defaults: Defaults | None = None,
    concurrency: int = 1,
    resources: cluster.Resources | None = None,
) -> Any:
    """Return a Ray dataset with a text for every row of `dataset`, computed when it is consumed.

    The column `prompt` has texts, lists of token ids, or conversations: lists of messages with role and content.
    Columns that are named as settings of batch lines (`temperature`, `seed`, `control` ...) are those of their rows; a
    row without takes them from `defaults`. All columns stay. Added are `text`, `finish_reason`, `prompt_tokens`,
    `completion_tokens`, `seed`, `entropic` (entropic time in nats, cost in bytes and the other figures of a batch
    file's rows) and `error`, which says why a row has no text, beginning with its name from the column `id`.

    `concurrency` actors have `resources` each, in Ray's names (`{"CPU": 4}`, `{"GPU": 1}`, `{"TPU": 4}`; a CPU by
    default). Each is one engine of `config` on these. Texts do not depend on blocks, actors, or how many there are.
    Rows come in the order in which blocks end.

    Raises UsageError if Ray is not installed, or the cluster has no room for the actors.
    """
    module, checked = cluster.ray(), cluster.check_resources(resources or {})
    actors = values.integer("concurrency", concurrency, 1)
    cluster.check_room(module, actors, checked)
    given = {"config": config, "prompt": prompt, "id": id, "defaults": defaults}
    return in_actors(dataset, Decoder, given, config, actors, checked)


def in_actors(
    dataset: Any,
    actor: type[Engine],
    given: Mapping[str, Any],
    config: EngineConfig,
    actors: int,
    resources: cluster.Resources,
) -> Any:
    """Return a dataset that is cut into blocks and mapped by `actors` of a class, each made of what is `given`."""
    size = rows_of_block(config)
    own = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return dataset.repartition(target_num_rows_per_block=size).map_batches(
        actor,
        batch_size=size,
        batch_format="pyarrow",
        fn_constructor_kwargs=dict(given),
        compute=cluster.ray().data.ActorPoolStrategy(
            size=actors, max_concurrent_calls_per_actor=BLOCKS, max_tasks_in_flight_per_actor=BLOCKS + _WAITING
        ),
        num_cpus=resources.get("CPU", 0),
        num_gpus=resources.get("GPU", 0),
        **({"resources": own} if own else {}),
    )

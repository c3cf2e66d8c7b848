"""Shards of lines through actors: every shard has its own output, manifest and journal, which this process writes.

Rows are the checkpoint: each is appended to its shard's output as soon as its block arrives. After a kill, the same
command serves the lines without a row. The blocks of an actor that dies are served again by another; none of their
rows was written.
"""

import array
import contextlib
import dataclasses
import glob
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from et_jax.batch.answers import answer_row, error_row
from et_jax.batch.job import ignored_text, survey, surveyed
from et_jax.batch.journal import SYNC_SECONDS, Journal, check_files, open_journal
from et_jax.batch.progress import LINE_SECONDS
from et_jax.batch.ray import cluster
from et_jax.batch.ray.decoder import Engine, idle_share, in_actors
from et_jax.batch.tasks import Defaults, Entry
from et_jax.errors import UsageError
from et_jax.serve.config import EngineConfig

_READ = 256  # lines that are handed on together
_HIDDEN = (".", "_")  # how files begin that are no shards: _SUCCESS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """The cluster, at "host:port" or only this machine, the number of actors, and the resources of each."""

    address: str | None = None
    actors: int = 1
    resources: cluster.Resources = dataclasses.field(default_factory=lambda: {"CPU": 1.0})


def shards(source: str, output: Path) -> dict[Path, Path]:
    """Return the output of every shard that `source` names: a file, a folder, or a pattern such as `in/*.jsonl`.

    A file goes to the file `output`; the files of a folder or a pattern to files of their names in a folder. Raises
    UsageError if there are none, and for two of one name.
    """
    path = Path(source)
    if path.is_file():
        return {path: output}
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith(_HIDDEN))
    else:
        found = sorted(file for file in map(Path, glob.glob(source)) if file.is_file())
    if not found:
        raise UsageError(f"{source} names no file; give --input a folder with files of prompts, a file, or a pattern.")
    if any(output.exists() and file.parent.samefile(output) for file in found):
        raise UsageError(f"{output} is the folder of the input; choose another --output.")
    if output.exists() and not output.is_dir():
        raise UsageError(f"{output} is not a folder; name one for the outputs of {len(found)} shards with --output.")
    placed = {file: output / (file.name if file.suffix == ".jsonl" else f"{file.name}.jsonl") for file in found}
    if len(set(placed.values())) < len(placed):
        names = [place.name for place in placed.values()]
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{source} names two shards whose output is {twice}; rename one.")
    return placed


@dataclasses.dataclass(kw_only=True)
class _Row:
    """The result of a line: its row as JSON, and its figures. `rows` and `idle` count its engine's slots so far.

    If `fault` is not empty, it says why the job cannot continue.
    """

    fault: str = ""
    shard: int = 0
    row: str = ""
    tokens: int = 0
    nats: float = 0.0
    engine: str = ""
    rows: int = 0
    idle: int = 0


def _table(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows, at least one, as columns."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def _lines(batch: Any) -> Iterator[dict[str, list[Any]]]:
    """Read the shard of a row, and yield each of its lines without a row as an Entry in JSON."""
    [shard] = batch.to_pylist()
    marks = array.array("Q", shard["marks"])
    pending: list[dict[str, Any]] = []
    try:
        for number, entry in enumerate(surveyed(Path(shard["source"]), marks, Path(shard["output"]), shard["column"])):
            if not shard["recorded"][number]:
                pending.append({"fault": "", "shard": shard["shard"], "entry": json.dumps(dataclasses.asdict(entry))})
            if len(pending) == _READ:
                yield _table(pending)
                pending = []
    except UsageError as error:
        pending.append({"fault": str(error), "shard": shard["shard"], "entry": ""})
    if pending:
        yield _table(pending)


class LineDecoder(Engine):
    """Answers the lines of batch files that `_lines` yields, and passes a fault on.

    An engine that cannot be made is a fault too, passed on as data, because Ray restarts an actor that fails.
    """

    def __init__(self, config: EngineConfig, defaults: Defaults, **more: Any) -> None:
        self._fault = ""
        try:
            super().__init__(config, defaults, **more)
        except UsageError as error:
            self._fault = error.on_command_line

    async def __call__(self, batch: Any) -> AsyncIterator[dict[str, list[Any]]]:
        rows = [_Row(fault=self._fault)] if self._fault else await self.within(self._answered, batch.to_pylist())
        yield _table([dataclasses.asdict(row) for row in rows])

    def _answered(self, lines: Sequence[Mapping[str, Any]]) -> list[_Row]:
        rows = [_Row(fault=line["fault"]) for line in lines if line["fault"]]
        asked = [(Entry(**json.loads(line["entry"])), line["shard"]) for line in lines if not line["fault"]]
        shard = {id(entry): number for entry, number in asked}
        engine = f"{self.model.name} {os.getpid()} {socket.gethostname()}"
        for one in self.answers([entry for entry, _ in asked]):
            row = _Row(shard=shard[id(one.entry)], engine=engine)
            if one.error is not None:
                answer = error_row(one.entry, *one.error)
            else:
                answer = answer_row(one.task, one.completions, self.model.name, self.model.tokenizer)
                row.tokens = sum(len(completion.token_ids) for completion in one.completions)
                row.nats = sum(completion.entropic_time for completion in one.completions)
            row.row = json.dumps(answer, ensure_ascii=False, allow_nan=False)
            row.rows, row.idle = self.model.metrics.step_rows, self.model.metrics.idle_rows
            rows.append(row)
        return rows


@dataclasses.dataclass(kw_only=True)
class Sums:
    """The totals of a run over all shards; `engines` has the rows of each engine's steps, and the idle ones.

    `ignored` names the fields of lines that change no text here.
    """

    total: int = 0
    before: int = 0
    answered: int = 0
    refused: int = 0
    tokens: int = 0
    nats: float = 0.0
    ignored: set[str] = dataclasses.field(default_factory=set)
    engines: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    began: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def done(self) -> int:
        """The number of lines with a row."""
        return self.before + self.answered + self.refused

    @property
    def rates(self) -> str:
        """Tokens and nats per second of the full job."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        return f"{self.tokens / seconds:.1f} tokens/s, {self.nats / seconds:.1f} nats/s"

    def __str__(self) -> str:
        earlier = f", {self.before} done before" if self.before else ""
        rows, idle = (sum(each) for each in zip(*self.engines.values(), strict=True)) if self.engines else (0, 0)
        return (
            f"[{self.total} lines: {self.answered} answered, {self.refused} error rows{earlier}; {self.tokens} tokens "
            f"and {self.nats:.1f} nats in {time.monotonic() - self.began:.1f} s, {self.rates}"
            f"{idle_share(rows, idle)} in {len(self.engines)} engines{ignored_text(self.ignored)}]"
        )


def run(
    placed: Mapping[Path, Path],
    settings: Mapping[str, Any],
    config: EngineConfig,
    defaults: Defaults,
    fleet: Fleet,
    *,
    verbose: bool = False,
) -> Sums:
    """Serve the lines of every shard that have no row yet, by actors of `fleet`, and return the totals.

    `placed` has the output of each shard, `settings` what all rows depend on. With `verbose` the output of the actors
    is shown.

    Raises UsageError if a shard is no file of lines or changes during the job, an output is another job's, or there
    is no Ray, no cluster or no room; rows that are written stay.
    """
    cluster.ray()
    for source, output in placed.items():
        check_files(source, output)
    with contextlib.ExitStack() as stack:
        for folder in dict.fromkeys(output.parent for output in placed.values()):
            stack.enter_context(_made(folder))
        journals = [stack.enter_context(open_journal(output, settings)) for output in placed.values()]
        surveys = [
            survey(source, journal, defaults.prompt_column) for source, journal in zip(placed, journals, strict=True)
        ]
        sums = Sums(total=sum(one.total for one in surveys), before=sum(one.before for one in surveys))
        sums.ignored.update(*(one.ignored for one in surveys))
        if sums.done < sums.total:
            items = [
                {
                    "shard": number,
                    "source": str(source.absolute()),
                    "output": str(output),
                    "column": defaults.prompt_column,
                    "marks": one.marks.tobytes(),
                    "recorded": bytes(one.recorded),
                }
                for number, ((source, output), one) in enumerate(zip(placed.items(), surveys, strict=True))
                if one.done < one.total
            ]
            module = stack.enter_context(cluster.connected(fleet.address, verbose=verbose))
            cluster.check_room(module, fleet.actors, fleet.resources)
            _serve(module, items, journals, sums, config, defaults, fleet)
    return sums


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder if it does not exist; remove it again if the job fails before a row is written."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made ({error.strerror}); choose another --output.") from error
    try:
        yield
    except UsageError:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise


def _serve(
    module: Any,
    items: list[dict[str, Any]],
    journals: Sequence[Journal],
    sums: Sums,
    config: EngineConfig,
    defaults: Defaults,
    fleet: Fleet,
) -> None:
    """Decode the lines of shards, and append every row to the journal of its shard when it arrives."""
    shown = module.data.DataContext.get_current()
    shown.enable_rich_progress_bars, shown.use_ray_tqdm = True, False  # bars on a terminal by what is installed
    lines = module.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _lines, batch_size=1, batch_format="pyarrow"
    )
    given = {"config": config, "defaults": defaults}
    answers = in_actors(lines, LineDecoder, given, config, fleet.actors, fleet.resources)
    said = synced = sums.began = time.monotonic()
    try:
        for table in answers.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for row in table.to_pylist():
                _record(_Row(**row), journals, sums)
            if time.monotonic() - synced >= SYNC_SECONDS:
                for journal in journals:
                    journal.sync_if_due()
                synced = time.monotonic()
            if time.monotonic() - said >= LINE_SECONDS:
                said = time.monotonic()
                print(f"{sums.done} of {sums.total} lines, {sums.rates}", file=sys.stderr, flush=True)
    except module.exceptions.RayError as error:
        said = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        raise UsageError(f"Ray ended the job ({said.strip()}); rows are kept: run the same command again.") from error


def _record(row: _Row, journals: Sequence[Journal], sums: Sums) -> None:
    """Append a row to its journal once, even if Ray delivers it twice. Raises UsageError for a fault."""
    if row.fault:
        raise UsageError(row.fault)
    journal, answer = journals[row.shard], json.loads(row.row)
    error = answer["error"]
    key = answer["custom_id"] or error["line"]
    if key in journal.recorded:
        return
    journal.append(answer)
    sums.answered += error is None
    sums.refused += error is not None
    sums.tokens += row.tokens
    sums.nats += row.nats
    sums.engines[row.engine] = max(sums.engines.get(row.engine, (0, 0)), (row.rows, row.idle))

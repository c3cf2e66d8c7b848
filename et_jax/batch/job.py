"""A batch job: completes every line of the input once, in any order, and writes its row as soon as it ends.

A line is done when its row is recorded, either an answer or an error. Errors are not retried, because the line itself
causes them. Lines that an interrupt ended early are not recorded, and the next run completes them.
"""

import array
import dataclasses
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from et_jax.batch.answers import answer_row, error_row
from et_jax.batch.journal import Journal
from et_jax.batch.progress import Progress
from et_jax.batch.serving import Serving, serve_entries
from et_jax.batch.strict import shown
from et_jax.batch.tasks import Defaults, Entry, Task, ignored_fields, read_entries
from et_jax.errors import UsageError
from et_jax.serve.completions import Completion

Watch = Callable[[Mapping[str, Any], Sequence[Completion]], None]
"""Receives every answer row that is written, and its completions."""

_METRICS_SECONDS = 5.0


@dataclasses.dataclass(kw_only=True)
class Summary:
    """The result of a run: `total` lines, of which `before` had a row already; sums over this run's answers.

    `programs` were compiled for the model so far, `programs_late` of them after warm-up; `idle_flops` went into rows
    that produced no token. `ignored` names unsupported fields of lines that do not change the text. `marks` are hashes
    of the surveyed lines, eight bytes each, and `recorded` is 1 for lines that had a row.
    """

    total: int = 0
    before: int = 0
    answered: int = 0
    refused: int = 0
    tokens: int = 0
    entropic_time: float = 0.0
    cost: float = 0.0
    flops: float = 0.0
    idle_flops: float = 0.0
    seconds: float = 0.0
    programs: int = 0
    programs_late: int = 0
    ignored: set[str] = dataclasses.field(default_factory=set)
    marks: array.array = dataclasses.field(default_factory=lambda: array.array("Q"), repr=False)
    recorded: bytearray = dataclasses.field(default_factory=bytearray, repr=False)

    @property
    def done(self) -> int:
        """The number of lines with a row."""
        return self.before + self.answered + self.refused

    def __str__(self) -> str:
        earlier = f", {self.before} done before" if self.before else ""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return (
            f"[{self.total} lines: {self.answered} answered, {self.refused} error rows{earlier}; "
            f"{self.tokens} tokens in {self.seconds:.1f} s, {rate:.1f} tokens/s; "
            f"entropic time {self.entropic_time:.1f} nats, cost {self.cost / 1e6:.1f} MB moved and "
            f"{self.flops / 1e9:.2f} GFLOP, {self.idle_flops / 1e9:.2f} more in idle rows; "
            f"{self.programs} programs compiled, {self.programs_late} after warm-up{ignored_text(self.ignored)}]"
        )


def ignored_text(fields: Collection[str]) -> str:
    """Return the end of a summary that names the fields of lines that were ignored."""
    return f"; ignored: {', '.join(sorted(fields))}" if fields else ""


def survey(path: Path, journal: Journal, column: str | None = None) -> Summary:
    """Return how many lines the input has and how many of them are done, before the job starts.

    Prompts are in `column`, if it is given.

    Rows without a line in the input are reported, and stay. Raises UsageError if a line differs from the line that its
    row was written for.
    """
    summary, strays = Summary(), set(journal.recorded)
    for entry in read_entries(path, column):
        summary.total += 1
        summary.ignored |= ignored_fields(entry)
        done = _is_done(entry, journal)
        summary.before += done
        summary.recorded.append(done)
        summary.marks.append(_mark(entry))
        strays.discard(entry.key)
    if nameless := [key for key in strays if isinstance(key, int)]:
        raise _outlived(min(nameless), journal)
    if strays:
        first = next(key for key in journal.recorded if key in strays)
        print(
            f"warning: {journal.path} has {len(strays)} rows that no line of the input asks for, the first of "
            f"custom_id {shown(first)}; they stay as they are",
            file=sys.stderr,
        )
    return summary


def surveyed(path: Path, marks: Sequence[int], output: Path, column: str | None = None) -> Iterator[Entry]:
    """Yield the lines of `path`, compared with the `marks` of a survey; `output` has the rows.

    Raises UsageError if the lines have changed.
    """
    number = 0
    for number, entry in enumerate(read_entries(path, column), 1):
        if number > len(marks):
            raise _changed(path, output, f"it has more than {len(marks)} lines")
        if _mark(entry) != marks[number - 1]:
            raise _changed(path, output, f"line {entry.line} is another than at the start")
        yield entry
    if number < len(marks):
        raise _changed(path, output, f"it has {number} lines, not {len(marks)}")


def _changed(path: Path, output: Path, how: str) -> UsageError:
    return UsageError(
        f"{path} was changed while the job ran ({how}); the rows in {output} are kept: run the same command again when "
        "the file is as it should be."
    )


def _mark(entry: Entry) -> int:
    return int(entry.id[-16:], 16)


def _outlived(line: int, journal: Journal) -> UsageError:
    return UsageError(
        f"Line {line} is not the line of the error row in {journal.path}; take that row "
        f'("line": {line}) out of it and run again, or choose another --output.'
    )


def _is_done(entry: Entry, journal: Journal) -> bool:
    recorded = journal.recorded.get(entry.key)
    if recorded is not None and recorded != entry.id:
        if entry.custom_id is None:
            raise _outlived(entry.line, journal)
        raise UsageError(
            f"Line {entry.line} (custom_id {shown(entry.custom_id)}) is not the line that {journal.path} has an answer "
            "to; give a changed line a custom_id of its own, or choose another --output."
        )
    return recorded == entry.id


def run(
    model: Serving,
    path: Path,
    journal: Journal,
    defaults: Defaults,
    summary: Summary,
    *,
    metrics_file: Path | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    watch: Watch = lambda row, completions: None,
) -> None:
    """Complete the lines of `path` without a row, and add the results to `summary`, which `survey` returned.

    The counters are written to `metrics_file` every few seconds and at the end; `watch` receives every answer. Raises
    UsageError if the output cannot be written, or the input has changed since the survey; the rows written so far stay.
    """
    began = time.monotonic()
    with Progress(summary.total, summary.before) as progress:
        job = _Job(model, path, journal, defaults, summary, progress, metrics_file, cancelled, watch)
        job.serve()
        job.look(last=True)
    summary.seconds = time.monotonic() - began
    summary.idle_flops = model.metrics.idle_flops
    summary.programs = model.metrics.programs_compiled
    summary.programs_late = model.metrics.programs_compiled_late


class _Job:
    """One run of a job: its files, its progress and its sums."""

    def __init__(
        self,
        model: Serving,
        path: Path,
        journal: Journal,
        defaults: Defaults,
        summary: Summary,
        progress: Progress,
        metrics_file: Path | None,
        cancelled: Callable[[], bool],
        watch: Watch,
    ) -> None:
        self._watch = watch
        self._model, self._path, self._journal, self._defaults = model, path, journal, defaults
        self._summary, self._progress, self._metrics_file, self._cancelled = summary, progress, metrics_file, cancelled
        self._looked = time.monotonic()
        self._fault: UsageError | None = None  # of the input; running requests still complete

    def serve(self) -> None:
        serve_entries(
            self._model,
            self._left(),
            self._defaults,
            ended=self._record,
            refused=lambda entry, message: self._refuse(entry, "invalid_request", message),
            cancelled=self._stops,
        )
        if self._fault is not None:
            raise self._fault

    def look(self, last: bool = False) -> None:
        """Do the periodic work if it is due: sync rows to disk, write the counters, show the progress."""
        self._journal.sync_if_due()
        self._progress.show(self._summary.done, self._summary.answered, self._summary.tokens)
        due = last or time.monotonic() - self._looked >= _METRICS_SECONDS
        if due and self._metrics_file is not None:
            self._model.metrics.write(self._metrics_file)
            self._looked = time.monotonic()

    def _stops(self) -> bool:
        """Return whether the job is cancelled; the engine calls this between two bursts."""
        self.look()
        return self._cancelled()

    def _left(self) -> Iterator[Entry]:
        """Yield the lines without a row, in the order of the file."""
        for entry in self._entries():
            if self._cancelled():
                return
            if not _is_done(entry, self._journal):
                yield entry

    def _entries(self) -> Iterator[Entry]:
        """Yield the surveyed lines, up to the first that has changed."""
        try:
            column = self._defaults.prompt_column
            yield from surveyed(self._path, self._summary.marks, self._journal.path, column)
        except UsageError as error:
            self._fault = error

    def _record(self, task: Task, completions: list[Completion]) -> None:
        if self._cancelled() and any(completion.finish_reason == "abort" for completion in completions):
            return
        errors = [completion.error for completion in completions if completion.error is not None]
        if errors:
            self._refuse(task.entry, "failed", errors[0])
            return
        row = answer_row(task, completions, self._model.name, self._model.tokenizer)
        self._journal.append(row)
        self._watch(row, completions)
        self._summary.answered += 1
        self._summary.tokens += sum(len(completion.token_ids) for completion in completions)
        self._summary.entropic_time += sum(completion.entropic_time for completion in completions)
        self._summary.cost += sum(completion.cost for completion in completions)
        self._summary.flops += sum(completion.flops for completion in completions)

    def _refuse(self, entry: Entry, code: str, message: str) -> None:
        self._journal.append(error_row(entry, code, message))
        self._summary.refused += 1
        self.look()

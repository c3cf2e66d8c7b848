"""Writes the answers of a finished job to a Parquet file, in the order of the input; a job itself writes JSON lines."""

import importlib
import json
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

from et_jax.batch.parquet import arrow_of
from et_jax.batch.tasks import Entry
from et_jax.io.files import check_writable, replace_file
from et_jax.serve.totals import Totals

_ROWS = 1024  # in memory at once
_TEXTS, _COUNTS = ("text", "finish_reason", "error"), ("prompt_tokens", "completion_tokens")


def is_table(output: Path) -> bool:
    """Return whether an output is to be a Parquet file."""
    return output.suffix == ".parquet"


def journal_of(output: Path) -> Path:
    """Return the path of an output's journal: a file beside it if the output is a Parquet file, otherwise itself."""
    return output.with_name(f"{output.name}.jsonl") if is_table(output) else output


def check_table(output: Path) -> None:
    """Raise UsageError, before any work, if a Parquet file cannot be written."""
    arrow_of(output)
    check_writable(output)


def write_table(output: Path, journal: Path, entries: Iterable[Entry]) -> None:
    """Write the rows of a journal to a Parquet file, a row for each continuation, in the order of `entries`.

    Raises UsageError if it cannot be written.
    """
    arrow = arrow_of(output)
    parquet, places = importlib.import_module("pyarrow.parquet"), {}
    schema = arrow.schema(kinds(arrow, ("custom_id", *_TEXTS), ("line", "index", *_COUNTS)))
    written, rows = BytesIO(), []
    with journal.open("rb") as file, parquet.ParquetWriter(written, schema) as writer:
        while line := file.readline():
            row = json.loads(line)
            places[row["error"]["line"] if row["custom_id"] is None else row["custom_id"]] = file.tell() - len(line)
        for entry in entries:
            file.seek(places[entry.key])
            rows += _rows(entry, json.loads(file.readline()))
            if len(rows) >= _ROWS:
                writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema=schema))
                rows = []
        writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema=schema))
    replace_file(output, written.getvalue())


def kinds(arrow: Any, texts: Iterable[str], integers: Iterable[str]) -> dict[str, Any]:
    """Return the Arrow types of the `texts` columns, of the columns `integers`, and of the entropic totals."""
    number = arrow.float64()
    others = {"temperature_range": arrow.list_(number), "guard_rates": arrow.map_(arrow.string(), number)}
    entropic = {
        name: arrow.int64() if "tokens" in name else others.get(name, number) for name in Totals.of([]).to_dict()
    }
    named = dict.fromkeys(texts, arrow.string()) | dict.fromkeys(integers, arrow.int64())
    return named | {"entropic": arrow.struct(list(entropic.items()))}


def _rows(entry: Entry, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the table rows of a line's row, one per continuation; figures are totals of all its continuations."""
    shared = {"custom_id": row["custom_id"], "line": entry.line, "index": 0}
    if row["error"] is not None:
        yield shared | {"error": row["error"]["message"]}
        return
    body = row["response"]["body"]
    shared |= {name: body["usage"][name] for name in _COUNTS} | {"entropic": body["entropic"]}
    for choice in body["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        yield shared | {"index": choice["index"], "text": text, "finish_reason": choice["finish_reason"]}

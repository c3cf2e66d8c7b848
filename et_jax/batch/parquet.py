"""Converts rows of a Parquet file, or of a data set that the library `datasets` saved, to JSON."""

import importlib
import json
import math
import numbers
from collections.abc import Iterator, Set
from decimal import Decimal
from pathlib import Path
from typing import Any

from et_jax.batch.strict import shown
from et_jax.errors import UsageError
from et_jax.io.json_files import checked, read_json
from et_jax.io.schema import DatasetFile
from et_jax.io.values import excerpt

_ROWS = 64  # in memory at once
_NAMED = 20  # columns in a sentence
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # of a data set in a folder, and of several
_EXACT = 2**53  # integers up to here are exact as floats, which pandas writes for a column with missing values


def read_rows(
    path: Path, column: str | None = None, others: Set[str] = frozenset()
) -> Iterator[tuple[bytes, str | None]]:
    """Yield each row as JSON; if it cannot be converted, its repr with a sentence that says why.

    `path` is a Parquet file, or a folder that `datasets` saved. If `column` is given, a row consists of it and of those
    of `others` that exist. NaN becomes null, a float without a fraction an integer, a decimal a number, bytes their
    UTF-8 text, a map an object, and a date or a time its text. Raises UsageError if the file cannot be read, or lacks
    the column.
    """
    arrow = arrow_of(path)
    kind = "data set" if path.is_dir() else "Parquet file"
    try:
        batches = _saved(path, arrow) if path.is_dir() else _stored(path)
        names: list[str] = next(batches).names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{path} has the column {shown(twice[0])} twice; rename one of them.")
        if column is not None and column not in names:
            there = ", ".join(map(excerpt, names[:_NAMED]))
            raise UsageError(
                f"{path} has no column {excerpt(column)}; name one of its own with --prompt-column: {there}."
            )
        wanted = names if column is None else [name for name in names if name == column or name in others]
        for rows in batches:
            yield from map(_row, rows.select(wanted).to_pylist())
    except UsageError:
        raise
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UsageError(f"{path} is not a readable {kind} ({said}); write it again.") from error


def arrow_of(path: Path) -> Any:
    """Return pyarrow, which reads and writes the file. Raises UsageError if it is not installed."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow; install it with: pip install 'et_jax[parquet]'.") from error


def _stored(path: Path) -> Iterator[Any]:
    """Yield the schema of a Parquet file, then its rows."""
    file = importlib.import_module("pyarrow.parquet").ParquetFile(path)
    yield file.schema_arrow
    yield from file.iter_batches(batch_size=_ROWS)


def _saved(folder: Path, arrow: Any) -> Iterator[Any]:
    """Yield the schema of a data set that was saved to a folder, then the rows of its Arrow streams in order."""
    for number, file in enumerate(saved_files(folder)):
        with arrow.memory_map(str(file)) as source, arrow.ipc.open_stream(source) as reader:
            if number == 0:
                yield reader.schema
            for batch in reader:
                yield from (batch.slice(begin, _ROWS) for begin in range(0, batch.num_rows, _ROWS))


def saved_files(folder: Path) -> list[Path]:
    """Return the files of a data set in a folder that `datasets` saved. Raises UsageError if there is none."""
    if (folder / _SPLITS).is_file():
        splits = read_json(folder / _SPLITS).get("splits")
        names = ", ".join(map(excerpt, map(str, splits))) if isinstance(splits, list) else "none"
        raise UsageError(f"{folder} contains several data sets ({names}); name the folder of one of them.")
    if not (folder / _STATE).is_file():
        raise UsageError(
            f"{folder} is a folder without a data set; name a file, a folder that datasets saved (save_to_disk), or "
            "serve its files with --ray."
        )
    files = checked(read_json(folder / _STATE), DatasetFile, folder / _STATE, "save the data set again")
    for one in files._data_files:
        if Path(one.filename).name != one.filename or not (folder / one.filename).is_file():
            raise UsageError(f"{folder / _STATE} names {excerpt(one.filename)}, which is not there; save it again.")
    return [folder / one.filename for one in files._data_files]


def _row(row: dict[str, Any]) -> tuple[bytes, str | None]:
    values = {}
    for name, value in row.items():
        try:
            values[name] = plain(value)
        except UnicodeDecodeError:
            return repr(row).encode(errors="replace"), f"{excerpt(name)} contains bytes that are no UTF-8; write texts."
        except ValueError as error:
            return repr(row).encode(errors="replace"), f"{excerpt(name)} {error}; write each once."
    return json.dumps(values, default=str).encode(), None


def plain(value: Any) -> Any:
    """Return a value converted for JSON; values of other types are returned unchanged.

    Raises UnicodeDecodeError for bytes that are not UTF-8, and ValueError for a map with a duplicate key.
    """
    match value:
        case bytes():
            return value.decode("utf-8")
        case None | bool() | int() | str():
            return value
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case numbers.Real():
            number = float(value)
            if math.isnan(number):
                return None
            return int(number) if number.is_integer() and abs(number) <= _EXACT else number
        case dict():
            return {name: plain(inner) for name, inner in value.items()}
        case list() if value and all(isinstance(pair, tuple) for pair in value):  # pyarrow's form of a map
            named = {str(plain(name)): plain(inner) for name, inner in value}
            if len(named) < len(value):
                names = [str(plain(name)) for name, _ in value]
                raise ValueError(f"has the key {shown(next(name for name in names if names.count(name) > 1))} twice")
            return named
        case list():
            return [plain(inner) for inner in value]
    return value

"""Rows of a Parquet file as the JSON they stand for."""

import importlib
import json
import math
import numbers
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from et_jax.batch.strict import shown
from et_jax.errors import UsageError
from et_jax.io.values import excerpt

_ROWS = 64  # held at once
_EXACT = 2**53  # whole numbers up to here survive as floats, as which pandas writes a column with a gap


def read_rows(path: Path) -> Iterator[tuple[bytes, str | None]]:
    """Yield each row as JSON; where it has no form in JSON, as its repr with a sentence that says why.

    NaN is a missing value; a whole float is an integer; a decimal is a number; bytes are the text they hold;
    a map is an object; a date or a time is its text. Raises UsageError where the file cannot be read.
    """
    try:
        arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow; install it with: pip install 'et_jax[parquet]'.") from error
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{path} has the column {shown(twice[0])} twice; rename one of them.")
        for rows in file.iter_batches(batch_size=_ROWS):
            yield from map(_row, rows.to_pylist())
    except UsageError:
        raise
    except (arrow.ArrowException, ValueError, OverflowError) as error:
        said = str(error).strip().partition("\n")[0]
        raise UsageError(f"{path} is not a readable Parquet file ({said}); write it again.") from error


def _row(row: dict[str, Any]) -> tuple[bytes, str | None]:
    values = {}
    for name, value in row.items():
        try:
            values[name] = plain(value)
        except UnicodeDecodeError:
            return repr(row).encode(errors="replace"), f"{excerpt(name)} holds bytes that are no UTF-8; write texts."
        except ValueError as error:
            return repr(row).encode(errors="replace"), f"{excerpt(name)} {error}; write each once."
    return json.dumps(values, default=str).encode(), None


def plain(value: Any) -> Any:
    """Return a value that JSON has a form for, where there is one.

    Raises UnicodeDecodeError for bytes that are no UTF-8, and ValueError for a map that has a key twice.
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
        case list() if value and all(isinstance(pair, tuple) for pair in value):  # how a map comes
            named = {str(plain(name)): plain(inner) for name, inner in value}
            if len(named) < len(value):
                names = [str(plain(name)) for name, _ in value]
                raise ValueError(f"has the key {shown(next(name for name in names if names.count(name) > 1))} twice")
            return named
        case list():
            return [plain(inner) for inner in value]
    return value

"""Rows of a Parquet file as the lines they stand for."""

import datetime
import json
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from stand_in import Letters

from et_jax.batch.lines import read_lines
from et_jax.batch.tasks import Defaults, read_entries, read_task
from et_jax.errors import UsageError
from et_jax.serve.requests import GenerationRequest, SamplingParams

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def lines(path: Path, table: Any) -> list[Any]:
    parquet.write_table(table, path / "in.parquet")
    return [json.loads(line.data or b"") for line in read_lines(path / "in.parquet")]


def requests(path: Path, table: Any) -> Iterator[GenerationRequest]:
    parquet.write_table(table, path / "in.parquet")
    for entry in read_entries(path / "in.parquet"):
        yield read_task(entry, Letters(), Defaults(params=SamplingParams())).request


def test_a_number_that_is_none_is_missing(tmp_path):
    """Pandas writes a missing number as NaN, and whole numbers beside it as 3.0."""
    nan = math.nan
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "id": [7.0, nan],
            "max_tokens": [3.0, nan],
            "temperature": [nan, 0.5],
            "metadata": [{"x": [nan, 1.5]}, {"x": []}],
        }
    )
    assert lines(tmp_path, table) == [
        {"prompt": "a", "id": 7, "max_tokens": 3, "temperature": None, "metadata": {"x": [None, 1.5]}},
        {"prompt": "b", "id": None, "max_tokens": None, "temperature": 0.5, "metadata": {"x": []}},
    ]
    first, second = requests(tmp_path, table)
    assert (first.params.max_tokens, first.params.temperature) == (3, 1.0)
    assert (second.params.max_tokens, second.params.temperature) == (256, 0.5)


def test_values_that_json_has_no_form_for(tmp_path):
    moment = datetime.datetime(2024, 2, 29, 12, 30)
    table = pyarrow.table(
        {
            "prompt": ["a"],
            "temperature": pyarrow.array([Decimal("0.25")], pyarrow.decimal128(5, 2)),
            "top_k": pyarrow.array([Decimal("40")], pyarrow.decimal128(5, 0)),
            "id": [moment],
            "metadata": pyarrow.array([[("day", "x"), ("b", "y")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
            "user": [datetime.date(2024, 2, 29)],
            "custom_id": pyarrow.array(["caf\u00e9".encode()], pyarrow.binary()),
        }
    )
    assert lines(tmp_path, table) == [
        {
            "prompt": "a",
            "temperature": 0.25,
            "top_k": 40,
            "id": "2024-02-29 12:30:00",
            "metadata": {"day": "x", "b": "y"},
            "user": "2024-02-29",
            "custom_id": "caf\u00e9",
        }
    ]
    (request,) = requests(tmp_path, table)
    assert (request.params.temperature, request.params.top_k) == (0.25, 40)


def test_nested_lists_and_structs(tmp_path):
    messages = [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": "Ho", "name": "x"}]
    table = pyarrow.table(
        {
            "custom_id": ["a", None],
            "url": ["/v1/chat/completions", None],
            "body": [{"messages": messages, "max_tokens": 3.0}, None],
            "prompt": [None, [1.0, 2.0]],
        }
    )
    chat, plain = requests(tmp_path, table)
    assert Letters().decode(chat.prompt) == "user: Hi\nassistant: Ho\n" and chat.params.max_tokens == 3  # type: ignore
    assert plain.prompt == (1, 2)


MAP = pyarrow.map_(pyarrow.string(), pyarrow.string())


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"max_tokens": [3.0, 2.5]}, "max_tokens is 2.5"),
        ({"temperature": [0.5, math.inf]}, "Infinity is no number"),
        ({"prompt": pyarrow.array([b"a", b"\xff\xfe"], pyarrow.binary())}, "prompt holds bytes that are no UTF-8"),
        ({"metadata": pyarrow.array([[("x", "1")], [("x", "1"), ("x", "2")]], MAP)}, 'has the key "x" twice'),
    ],
)
def test_a_value_that_cannot_be_is_its_line_alone(tmp_path, columns, words):
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]} | columns), tmp_path / "in.parquet")
    good, bad = read_entries(tmp_path / "in.parquet")
    assert read_task(good, Letters(), Defaults(params=SamplingParams())).request.prompt == "a"
    with pytest.raises(UsageError, match=words):
        read_task(bad, Letters(), Defaults(params=SamplingParams()))


@pytest.mark.parametrize("names", [["prompt", "prompt"], ["id", "prompt", "id"]])
def test_a_column_twice_is_refused(tmp_path, names):
    columns = [pyarrow.array(["a"]) for _ in names]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=f'has the column "{names[0]}" twice; rename one'):
        list(read_lines(tmp_path / "in.parquet"))

"""Rows of a Parquet file as the lines they stand for."""

import json
import math
from decimal import Decimal

import pytest
from stand_in import Letters

from et_jax.batch.lines import read_lines
from et_jax.batch.tasks import Defaults, read_entries, read_task
from et_jax.errors import UsageError
from et_jax.serve.requests import SamplingParams

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


NAN, DECIMAL, MAP = math.nan, pyarrow.decimal128(5, 2), pyarrow.map_(pyarrow.string(), pyarrow.string())
TURN = {"role": "user", "content": "Hi", "name": None}


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("id", [7.0, NAN], [7, None]),  # as Pandas writes a missing number, and integers beside it
        ("temperature", [NAN, 0.5], [None, 0.5]),
        ("metadata", [{"x": [NAN, 1.5]}, {"x": []}], [{"x": [None, 1.5]}, {"x": []}]),
        ("prompt", [None, [1.0, 2.0]], [None, [1, 2]]),
        ("body", [{"messages": [TURN], "max_tokens": 3.0}, None], [{"messages": [TURN], "max_tokens": 3}, None]),
        ("temperature", pyarrow.array([Decimal("0.25"), Decimal("40")], DECIMAL), [0.25, 40]),
        ("metadata", pyarrow.array([[("day", "x"), ("b", "y")], None], MAP), [{"day": "x", "b": "y"}, None]),
        ("prompt", pyarrow.array(["caf\u00e9".encode(), b""], pyarrow.binary()), ["caf\u00e9", ""]),
        ("prompt", [f"It was {i}" for i in range(150)], [f"It was {i}" for i in range(150)]),
    ],
)
def test_a_value_has_the_form_that_json_has_for_it(tmp_path, name, column, values):
    """A file is told by its content: its name has no suffix."""
    parquet.write_table(pyarrow.table({name: column}), tmp_path / "in")
    lines = list(read_lines(tmp_path / "in"))
    assert [line.number for line in lines] == list(range(1, len(values) + 1))
    assert repr([json.loads(line.data or b"")[name] for line in lines]) == repr(values)  # 3 is not 3.0


def test_columns_without_a_value_ask_for_nothing(tmp_path):
    """Rows of a batch and plain ones, in one table."""
    urls, bodies = ["/v1/chat/completions", None], [{"messages": [TURN], "max_tokens": 3.0}, None]
    columns = {"custom_id": ["a", None], "url": urls, "body": bodies, "prompt": [None, "b"], "top_k": [None, NAN]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    entries = read_entries(tmp_path / "in.parquet")
    chat, plain = (read_task(entry, Letters(), Defaults(params=SamplingParams())).request for entry in entries)
    assert Letters().decode(chat.prompt) == "user: Hi\n" and chat.params.max_tokens == 3  # type: ignore
    assert plain.prompt == "b" and plain.params == SamplingParams()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"max_tokens": [3.0, 2.5]}, "max_tokens is 2.5"),
        ({"temperature": [0.5, math.inf]}, "Infinity is no number"),
        ({"prompt": pyarrow.array([b"a", b"\xff\xfe"], pyarrow.binary())}, "prompt contains bytes that are no UTF-8"),
        ({"metadata": pyarrow.array([[("x", "1")], [("x", "1"), ("x", "2")]], MAP)}, 'has the key "x" twice'),
    ],
)
def test_a_value_that_cannot_be_is_its_line_alone(tmp_path, columns, words):
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]} | columns), tmp_path / "in.parquet")
    good, bad = read_entries(tmp_path / "in.parquet")
    assert read_task(good, Letters(), Defaults(params=SamplingParams())).request.prompt == "a"
    with pytest.raises(UsageError, match=words):
        read_task(bad, Letters(), Defaults(params=SamplingParams()))


def test_a_torn_file_and_a_column_twice_are_refused(tmp_path):
    path = tmp_path / "in.parquet"
    for names in (["prompt", "prompt"], ["id", "prompt", "id"]):
        parquet.write_table(pyarrow.Table.from_arrays([pyarrow.array(["a"]) for _ in names], names=names), path)
        with pytest.raises(UsageError, match=f'has the column "{names[0]}" twice; rename one'):
            list(read_lines(path))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UsageError, match=r"in\.parquet is not a readable Parquet file"):
        list(read_lines(path))

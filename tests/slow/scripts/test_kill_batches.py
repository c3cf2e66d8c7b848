"""What the script that kills batches would notice."""

import json
import random
import subprocess
import sys

import pytest
from scripts_here import script

pytestmark = pytest.mark.usefixtures("hardly_optimised")


@pytest.fixture
def kills():
    return script("kill_batches")


def output(path, *rows):
    """Write rows, (name, text, when they were created), as a batch does."""
    with path.open("w") as file:
        for name, text, created in rows:
            body = {"created": created, "choices": [{"text": text}], "usage": {}, "entropic": {"entropic_time": 1.0}}
            row = {"id": f"batch_{name}", "custom_id": name, "response": {"body": body}, "error": None}
            file.write(json.dumps(row) + "\n")
    return path


A, B = ("a", "one", 1), ("b", "two", 1)


def test_rows_are_the_same_whenever_they_were_written(kills, tmp_path):
    calm, wild = output(tmp_path / "calm", A, B), output(tmp_path / "wild", ("b", "two", 2), A)
    kills.compare(kills.rows(calm), kills.rows(wild), {"a", "b"})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([A], "1 lines have no row"),
        ([A, B, ("c", "three", 1)], "1 rows no line"),
        ([A, ("b", "too", 1)], "1 rows differ from an undisturbed run: b"),
        ([A, B, A], "a has two rows"),
    ],
)
def test_a_difference_is_an_error(kills, tmp_path, rows, said):
    calm = output(tmp_path / "calm", A, B)
    with pytest.raises(kills.Broken, match=said):
        kills.compare(kills.rows(calm), kills.rows(output(tmp_path / "wild", *rows)), {"a", "b"})


def test_a_traceback_is_an_error(kills, tmp_path):
    file = tmp_path / "et_jax.py"
    file.write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    with pytest.raises(kills.Broken, match="traceback after SIGINT"):
        kills.kill(process, kills.signal.SIGINT)


def test_the_mixture_has_every_kind_of_line(kills):
    asked = kills.lines(300)
    assert len(asked) == 300
    assert {"n", "stop", "logprobs", "top_p"} <= {name for line in asked.values() for name in line.get("body", line)}


def test_a_torn_row_is_a_beginning_of_the_last(kills, tmp_path):
    path = output(tmp_path / "out", A, B)
    before = path.read_bytes()
    assert kills.tear(path, random.Random(0))
    torn = path.read_bytes().removeprefix(before)
    assert torn and before.splitlines()[-1].startswith(torn) and torn + b"\n" not in before
    assert not kills.tear(path, random.Random(0))  # one at a time

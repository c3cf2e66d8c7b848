"""What the script that kills batches would notice."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts_here import script

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def row(name: str, text: str, created: int = 1) -> dict[str, Any]:
    body = {"created": created, "choices": [{"text": text}], "usage": {}, "entropic": {"entropic_time": 1.0}}
    return {"id": f"batch_{name}", "custom_id": name, "response": {"body": body}, "error": None}


def written(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_rows_are_the_same_whenever_they_were_written(tmp_path):
    kills = script("kill_batches")
    calm = written(tmp_path / "calm", row("a", "one"), row("b", "two"))
    wild = written(tmp_path / "wild", row("b", "two", created=2), row("a", "one"))
    kills.compare(kills.rows(calm), kills.rows(wild), {"a", "b"})


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("a", "one")], "1 lines have no row"),
        ([row("a", "one"), row("b", "two"), row("c", "three")], "1 rows no line"),
        ([row("a", "one"), row("b", "too")], "1 rows differ from an undisturbed run: b"),
        ([row("a", "one"), row("b", "two"), row("a", "one")], "a has two rows"),
    ],
)
def test_a_difference_is_told(tmp_path, rows, said):
    kills = script("kill_batches")
    calm = written(tmp_path / "calm", row("a", "one"), row("b", "two"))
    with pytest.raises(kills.Broken, match=said):
        kills.compare(kills.rows(calm), kills.rows(written(tmp_path / "wild", *rows)), {"a", "b"})


def test_a_traceback_is_told(tmp_path):
    kills = script("kill_batches")
    file = tmp_path / "et_jax.py"
    file.write_text("import time; print('ready', flush=True); time.sleep(60)")
    process = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    with pytest.raises(kills.Broken, match="traceback after SIGINT"):
        kills.kill(process, kills.signal.SIGINT)


def test_a_torn_row_is_a_beginning_of_the_last(tmp_path):
    kills, output = script("kill_batches"), written(tmp_path / "out", row("a", "one"), row("b", "two"))
    before = output.read_bytes()
    assert kills.tear(output, random.Random(0))
    after = output.read_bytes()
    torn = after.removeprefix(before)
    assert torn and len(torn) < len(after) and before.splitlines()[-1].startswith(torn)
    assert not kills.tear(output, random.Random(0))  # one at a time


def test_the_mixture_names_every_line_once():
    kills = script("kill_batches")
    asked = kills.lines(300)
    assert len(kills.names(asked)) == 300
    assert {"n", "stop", "logprobs", "top_p"} <= {name for line in asked for name in line.get("body", line)}

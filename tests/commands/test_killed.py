"""A job that is killed again and again: in the end every line has one row, the row of an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS, ROOT
from stand_in import PaperModel

from et_jax.generate import main
from et_jax.serve import engine

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PROGRAMS = {"paper": [str(HELPERS / "stand_in.py")], "bundled": ["-m", "et_jax.generate"]}


def start(model: str, source: Path, output: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, *PROGRAMS[model], "-i", str(source), "-o", str(output), *more]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def finish(process: subprocess.Popen[bytes]) -> str:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err.decode()
    assert out == b""
    return err.decode()


def rows(output: Path) -> dict[str, Any]:
    """The rows by custom_id, every line JSON and every name new.

    Without the time they were written, and the cost, which is less in a batch of several.
    """
    found: dict[str, Any] = {}
    for line in output.read_bytes().splitlines():
        row = json.loads(line)
        assert row["custom_id"] not in found
        body = row["response"]["body"]
        del body["created"], body["entropic"]["cost_bytes"], body["entropic"]["nats_per_byte"]
        found[row["custom_id"]] = row
    return found


def write_lines(source: Path, count: int, max_tokens: int) -> None:
    """Prompts of both forms, each with its own seed."""
    with source.open("w") as file:
        for i in range(count):
            body = {"prompt": f"It was the {i}th", "max_tokens": max_tokens, "seed": i}
            line = body if i % 2 else {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def lines_in(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def disturb(model: str, source: Path, output: Path, count: int, kills: int) -> None:
    """Kill the job at `kills` random points of its way through `count` lines; some kills leave a torn line."""
    draw = random.Random(0)
    for at in sorted(draw.sample(range(count - 1), kills)):
        process = start(model, source, output)
        deadline = time.monotonic() + 300
        while lines_in(output) <= at and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        *whole, torn = output.read_bytes().split(b"\n")
        assert all(json.loads(line) for line in whole)
        if torn == b"" and draw.random() < 0.5:  # a kill seldom falls inside a write: tear a line by hand
            with output.open("ab") as file:
                file.write(whole[-1][: draw.randrange(len(whole[-1]))])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "count", "kills", "max_tokens"), [("paper", 500, 5, 8), ("bundled", 100, 2, 6)])
def test_every_line_is_answered_once_and_as_if_undisturbed(tmp_path, model, count, kills, max_tokens):
    source, calm, wild = tmp_path / "in.jsonl", tmp_path / "calm.jsonl", tmp_path / "wild.jsonl"
    write_lines(source, count, max_tokens)
    finish(start(model, source, calm))
    disturb(model, source, wild, count, kills)
    said = finish(start(model, source, wild))
    expected = {f"line-{i + 1}" if i % 2 else f"c{i}" for i in range(count)}
    assert rows(wild).keys() == expected
    assert rows(wild) == rows(calm)
    assert "done before" in said and "0 error rows" in said


def test_an_interrupt_keeps_what_is_done_and_says_how_to_resume(tmp_path, monkeypatch, capfd):
    source, output, metrics = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "metrics.txt"
    write_lines(source, 1000, 8)
    process = start("paper", source, output, "--metrics", str(metrics))
    while lines_in(output) < 20 and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    done = lines_in(output)
    assert process.returncode == 130 and 20 <= done < 1000
    assert "run the same command again to resume" in err.decode() and "Traceback" not in err.decode()
    assert all(row["response"] for row in rows(output).values())
    assert f'et_jax_requests_finished_total{{reason="length"}} {done}' in metrics.read_text()
    monkeypatch.setattr(engine, "load", lambda *_, **__: PaperModel())
    assert main(["-i", str(source), "-o", str(output)]) == 0 and len(rows(output)) == 1000
    assert f"{done} done before" in capfd.readouterr().err

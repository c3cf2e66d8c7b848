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

    Without the time they were written, and the cost, which is less in company.
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


@pytest.mark.parametrize(
    ("model", "count", "kills", "max_tokens"),
    [
        pytest.param("paper", 500, 5, 8, marks=pytest.mark.slow),
        pytest.param("bundled", 200, 3, 6, marks=pytest.mark.slow),
    ],
)
def test_every_line_is_answered_once_and_as_if_undisturbed(
    tmp_path: Path, model: str, count: int, kills: int, max_tokens: int
) -> None:
    source, calm, wild = tmp_path / "in.jsonl", tmp_path / "calm.jsonl", tmp_path / "wild.jsonl"
    write_lines(source, count, max_tokens)
    finish(start(model, source, calm))
    disturb(model, source, wild, count, kills)
    said = finish(start(model, source, wild))
    expected = {f"line-{i + 1}" if i % 2 else f"c{i}" for i in range(count)}
    assert rows(wild).keys() == expected
    assert rows(wild) == rows(calm)
    assert "done before" in said and "0 error rows" in said


def test_an_interrupt_keeps_what_is_done_and_says_how_to_resume(tmp_path: Path) -> None:
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
    assert f"{done} done before" in finish(start("paper", source, output))
    assert len(rows(output)) == 1000


def test_a_full_disk_ends_in_one_sentence_and_keeps_whole_rows(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: a write comes back short, then fails."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, 100, 8)
    (program,) = PROGRAMS["paper"]
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000));"
        f"sys.argv = [{program!r}, '-i', {str(source)!r}, '-o', {str(output)!r}];"
        f"runpy.run_path({program!r}, run_name='__main__')"
    )
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=120, check=False)
    complaint = done.stderr.decode().splitlines()[-1]
    kept = len(rows(output))
    assert done.returncode != 0 and "Traceback" not in done.stderr.decode()
    assert (
        complaint.startswith("error: ")
        and "cannot be written" in complaint
        and f"its {kept} rows are kept" in complaint
    )
    assert 0 < kept < 100 and output.read_bytes().endswith(b"\n")
    finish(start("paper", source, output))
    assert len(rows(output)) == 100


def test_an_output_that_is_removed_amid_the_job_is_no_success(tmp_path: Path) -> None:
    source, output, rescued = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.rescued"
    write_lines(source, 1000, 8)
    process = start("paper", source, output)
    while lines_in(output) < 20 and process.poll() is None:
        time.sleep(0.005)
    output.unlink()
    _, err = process.communicate(timeout=60)
    said = err.decode().splitlines()[-1]
    kept = rows(rescued)
    assert process.returncode == 2 and "Traceback" not in err.decode()
    assert said.startswith(f"error: {output} was removed") and f"its {len(kept)} rows are kept in {rescued}" in said
    assert len(kept) >= 20 and not output.exists()
    rescued.rename(output)
    assert f"{len(kept)} done before" in finish(start("paper", source, output))
    assert len(rows(output)) == 1000 and not rescued.exists()


@pytest.mark.slow
def test_an_input_that_is_cut_amid_the_job_is_no_interrupt(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_lines(source, 3000, 8)
    whole = source.read_bytes()
    process = start("paper", source, output)
    while lines_in(output) < 20 and process.poll() is None:
        time.sleep(0.005)
    os.truncate(source, len(whole) * 9 // 10)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "interrupted" not in err.decode()
    assert f"error: {source} was changed while the job ran" in err.decode()
    assert all(row["response"] for row in rows(output).values())
    source.write_bytes(whole)
    finish(start("paper", source, output))
    assert len(rows(output)) == 3000

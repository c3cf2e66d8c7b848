"""`--ray`: what is refused before Ray is asked for anything, in one sentence, with nothing written."""

import contextlib
import json
from typing import Any

import pytest

from et_jax.batch.ray import cluster, folder
from et_jax.cli.command import USAGE
from et_jax.generate import main


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a Ray that is there, and ends the test when it is asked for a cluster."""
    monkeypatch.setattr(cluster, "ray", lambda: None)
    monkeypatch.setattr(cluster, "connected", None)


def said(capfd: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([str(argument) for argument in arguments]) == USAGE
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and line.endswith(".")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "It was", "--ray"], "--ray is for --input"),
        (["-i", "in", "-o", "out", "--ray-actors", "2"], "--ray-actors needs --ray"),
        (["-i", "in", "-o", "out", "--ray", "--metrics", "m"], "--metrics reports on one process"),
        (["-i", "in", "-o", "out", "--ray", "--ray-actors", "0"], "ray_actors is 0; it must be at least 1"),
        (["-i", "in", "-o", "out", "--ray", "--ray-resources", "GPU"], "write it as CPU=4 or CPU=8,GPU=1"),
        (["-i", "nowhere", "-o", "out", "--ray"], "nowhere names no file"),
        (["-i", "tables", "-o", "out", "--ray"], "table.csv seems to be a table (CSV)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path, monkeypatch, capfd, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/table.csv").write_text("id,prompt\n1,It was\n")
    assert words in said(capfd, *arguments)
    assert [file.name for file in tmp_path.iterdir()] == ["tables"]


def test_the_output_of_another_job_is_refused_and_stays(tmp_path, monkeypatch, capfd):
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for shard in range(2):
        (source / f"s{shard}.jsonl").write_text(json.dumps({"id": f"r{shard}", "prompt": "It was"}) + "\n")
    monkeypatch.setattr(cluster, "check_room", lambda *_: None)
    monkeypatch.setattr(folder, "_serve", lambda *_: None)
    monkeypatch.setattr(cluster, "connected", lambda *_, **__: contextlib.nullcontext())
    assert main(["-i", str(source), "-o", str(output), "--ray", "--seed", "1"]) == 0
    capfd.readouterr()
    row = {"id": "batch_req_other", "custom_id": "r0", "response": {}, "error": None}
    (output / "s0.jsonl").write_text(json.dumps(row) + "\n")
    before = {file.name: file.read_bytes() for file in output.iterdir()}
    assert "--seed was 1 and is 2" in said(capfd, "-i", source, "-o", output, "--ray", "--seed", "2")
    assert "not the line that" in said(capfd, "-i", source, "-o", output, "--ray", "--seed", "1")
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before

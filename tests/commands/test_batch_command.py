"""The command line of a batch: what it refuses, and when it will not go on."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from stand_in import PaperModel

from et_jax.batch.ray import cluster, folder
from et_jax.cli.command import USAGE
from et_jax.generate import main
from et_jax.models.bundled import bundled_folder
from et_jax.serve import engine

pytestmark = pytest.mark.usefixtures("hardly_optimised")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The arguments that name an input of two lines and an output."""
    lines = [{"id": name, "prompt": f"It was {name}", "max_tokens": 3} for name in ("a", "b")]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return ["-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]


@pytest.fixture
def paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "load", lambda *_, **__: PaperModel())


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command that must fail."""
    code = main(list(arguments))
    out, err = capfd.readouterr()
    assert code != 0 and out == "" and "Traceback" not in err
    said = err.splitlines()[-1]
    assert said.startswith("error: ") and said.endswith(".")
    return said


FILES = ("-i", "in.jsonl", "-o", "out.jsonl")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*FILES, "--trace", "file.png"), "--trace is for --prompt"),
        (("-p", "It was", "--output", "file"), "--output is for --input"),
        (FILES[:2], "--input needs --output"),
        (("-i", "absent", *FILES[2:]), "does not exist"),
        ((*FILES[:2], "-o", "link"), "link is not a regular file"),
        ((*FILES[:2], "-o", "x" * 250), "cannot be written (File name too long)"),  # with what a manifest adds
        (("-p", "It was", "--ray"), "--ray is for --input"),
        ((*FILES, "--ray-actors", "2"), "--ray-actors needs --ray"),
        ((*FILES, "--ray", "--metrics", "m"), "--metrics reports on one process"),
        ((*FILES, "--ray", "--ray-actors", "0"), "ray_actors is 0; it must be at least 1"),
        ((*FILES, "--ray", "--ray-resources", "GPU"), "write it as CPU=4 or CPU=8,GPU=1"),
        (("-i", "nowhere", "-o", "out", "--ray"), "nowhere names no file"),
        (("-i", "tables", "-o", "out", "--ray"), "table.csv seems to be a table (CSV)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded_or_written(
    files, tmp_path, capfd, monkeypatch, arguments, words
):
    monkeypatch.delattr(engine, "load")
    monkeypatch.setattr(cluster, "ray", lambda: None)  # a Ray that is there, and is asked for no cluster
    monkeypatch.setattr(cluster, "connected", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables/table.csv").write_text("id,prompt\n1,It was\n")
    assert main(list(arguments)) == USAGE
    [said] = capfd.readouterr().err.splitlines()
    assert said.startswith("error: ") and said.endswith(".") and words in said
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "link", "tables"]


def test_the_output_of_another_job_on_ray_is_refused_and_stays(tmp_path, monkeypatch, capfd):
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for shard in range(2):
        (source / f"s{shard}.jsonl").write_text(json.dumps({"id": f"r{shard}", "prompt": "It was"}) + "\n")
    monkeypatch.setattr(cluster, "ray", lambda: None)
    monkeypatch.setattr(cluster, "check_room", lambda *_: None)
    monkeypatch.setattr(folder, "_serve", lambda *_: None)
    monkeypatch.setattr(cluster, "connected", lambda *_, **__: contextlib.nullcontext())
    command = ["-i", str(source), "-o", str(output), "--ray", "--seed"]
    assert main([*command, "1"]) == 0
    capfd.readouterr()
    row = {"id": "batch_req_other", "custom_id": "r0", "response": {}, "error": None}
    (output / "s0.jsonl").write_text(json.dumps(row) + "\n")
    before = {file.name: file.read_bytes() for file in output.iterdir()}
    monkeypatch.setattr(cluster, "connected", None)
    assert "--seed was 1 and is 2" in complaint(capfd, *command, "2")
    assert "not the line that" in complaint(capfd, *command, "1")
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before


@pytest.mark.usefixtures("paper")
def test_what_changes_answers_is_a_setting_and_the_same_settings_have_nothing_left_to_do(
    files, tmp_path, capfd, monkeypatch
):
    files += ["--seed", "1"]
    assert main(files) == 0
    assert "[2 lines: 2 answered, 0 error rows; 6 tokens" in capfd.readouterr().err
    rows = (tmp_path / "out.jsonl").read_bytes()
    assert "--seed was 1 and is 2" in complaint(capfd, *files, "--seed", "2")
    assert "--control was off and is guarded" in complaint(capfd, *files, "--control", "guarded")
    assert "--max-num-seqs was 8 and is 4" in complaint(capfd, *files, "--max-num-seqs", "4")
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        assert "the kind of device was cpu and is gpu" in complaint(capfd, *files)
    monkeypatch.delattr(engine, "load")
    for same in ("--max-num-seqs 8", "--replicas 2", "--num-pages 99", "--max-num-batched-tokens 9"):
        assert main([*files, *same.split()]) == 0
        assert "0 answered, 0 error rows, 2 done before" in capfd.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == rows


def test_a_real_model_answers_and_a_changed_one_is_refused(files, tmp_path, capfd):
    shutil.copytree(bundled_folder(), tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with (tmp_path / "in.jsonl").open("a") as file:  # a conversation, and a prompt that is too long
        talk = {"id": "c", "messages": [{"role": "user", "content": "It was a"}], "max_tokens": 3}
        file.write(f"\n{json.dumps(talk)}\n{json.dumps({'id': 'd', 'prompt': 'It was a' * 99})}\n")
    files += ["--model", str(tmp_path / "model"), "--max-model-len", "64", "--max-num-seqs", "2", "--seed", "1"]
    assert main(files) == 0
    rows = {row["custom_id"]: row for row in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert "tokens" in rows["d"]["error"]["message"] and rows["d"]["response"] is None
    bodies = [rows[name]["response"]["body"] for name in ("a", "b", "c")]
    assert [body["usage"]["completion_tokens"] for body in bodies] == [3, 3, 3]
    assert all(body["entropic"]["cost_bytes"] > 0 for body in bodies)
    assert bodies[2]["choices"][0]["message"]["role"] == "assistant"
    settings = tmp_path / "model" / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rope_theta": 12345.0}))
    assert re.search(r"; [1-9]\d* programs compiled, 0 after warm-up\]", capfd.readouterr().err)
    assert "the digest of the files of the model and its adapter was" in complaint(capfd, *files)


def test_a_second_job_leaves_everything_as_it_is(files, tmp_path, capfd, monkeypatch):
    """It is refused whatever its settings are, before it writes a manifest or counters."""
    more = ["--metrics", str(tmp_path / "counters"), "--seed", "5"]
    seen = []

    def contents() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class Watching(PaperModel):
        def warm_up(self) -> None:  # the first job still loads
            seen.append(contents())
            assert "is being written by another job" in complaint(capfd, *files, *more)
            seen.append(contents())

    monkeypatch.setattr(engine, "load", lambda *_, **__: Watching())
    (tmp_path / "counters").write_text("counted")
    assert main(files) == 0
    assert seen[0] == seen[1] and seen[0]["counters"] == b"counted"


@pytest.mark.parametrize(
    ("shortage", "told"),
    [
        (MemoryError(), "No memory is left"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), "No memory is left"),
        (RuntimeError("can't start new thread"), "The system starts no more threads"),
    ],
)
def test_a_shortage_is_a_sentence_and_loses_no_row(shortage, told, files, tmp_path, capfd, monkeypatch):
    class Exhausted(PaperModel):
        def as_completed(self, *given: Any, **more: Any) -> Iterator[Any]:
            for number, answer in enumerate(super().as_completed(*given, **more)):
                if number == 1:
                    raise shortage
                yield answer

    monkeypatch.setattr(engine, "load", lambda *_, **__: Exhausted())
    assert told in complaint(capfd, *files)
    kept = (tmp_path / "out.jsonl").read_bytes()
    assert len(kept.splitlines()) == 1
    monkeypatch.setattr(engine, "load", lambda *_, **__: PaperModel())
    assert main(files) == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)
    assert "1 answered, 0 error rows, 1 done before" in capfd.readouterr().err


@pytest.mark.usefixtures("paper")
def test_rows_that_no_line_asks_for_are_told_of_and_stay(files, tmp_path, capfd):
    assert main(files) == 0
    assert "no line" not in capfd.readouterr().err
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    with (tmp_path / "out.jsonl").open("a") as file:
        for name in ("mine", "mine too"):
            file.write(json.dumps(row | {"custom_id": name, "id": f"batch_req_{name}"}) + "\n")
    rows = (tmp_path / "out.jsonl").read_bytes()
    assert main(files) == 0
    [said] = [line for line in capfd.readouterr().err.splitlines() if "no line" in line]
    told = 'has 2 rows that no line of the input asks for, the first of custom_id "mine"; they stay as they are'
    assert said == f"warning: {tmp_path / 'out.jsonl'} {told}"
    assert (tmp_path / "out.jsonl").read_bytes() == rows

"""The command line of a batch: what it refuses, and when it will not go on."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from stand_in import PaperModel

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


@pytest.mark.parametrize("flag", ["--trace", "--plot", "--json", "--no-stream"])
def test_flags_of_a_prompt_are_refused(files: list[str], capfd: pytest.CaptureFixture[str], flag: str) -> None:
    more = ["file.png"] if flag in ("--trace", "--plot") else []
    assert f"{flag} is for --prompt" in complaint(capfd, *files, flag, *more)


def test_flags_of_a_batch_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert "--output is for --input" in complaint(capfd, "-p", "It was", "--output", "file")


def test_the_files_are_checked_first(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(engine, "load")  # nothing may be loaded
    assert "--input needs --output" in complaint(capfd, *files[:2])
    assert "does not exist" in complaint(capfd, "-i", str(tmp_path / "absent"), *files[2:])
    assert "is the same file as --input" in complaint(capfd, *files[:2], "-o", files[1])
    assert "cannot be written" in complaint(capfd, *files[:2], "-o", "/proc/nowhere/out.jsonl")
    assert "cannot be written" in complaint(capfd, *files, "--metrics", "/proc/nowhere/metrics")
    assert "temperature is -1.0" in complaint(capfd, *files, "--temperature", "-1")
    assert not (tmp_path / "out.jsonl").exists()


def test_how_much_is_served_at_once(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(engine, "load", lambda *_, **settings: asked.append(settings) or PaperModel())
    assert main(files) == 0
    flags = ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--replicas", "2"]
    assert main([*files[:3], files[3] + "2", *flags]) == 0
    names = ("max_num_seqs", "max_num_batched_tokens", "replicas")
    assert [tuple(settings[name] for name in names) for settings in asked] == [(8, 512, 1), (4, 64, 2)]


def test_an_interrupt_before_the_first_line_says_how_to_resume(
    files: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "load", interrupted)
    assert main(files) == 130
    assert capfd.readouterr().err.endswith("run the same command again to resume\n")


@pytest.mark.usefixtures("paper")
def test_other_sampling_is_refused_and_the_same_has_nothing_left_to_do(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*files, "--seed", "1"]) == 0
    assert "[2 lines: 2 answered, 0 error rows; 6 tokens" in capfd.readouterr().err
    rows = (tmp_path / "out.jsonl").read_bytes()
    assert "seed" in complaint(capfd, *files, "--seed", "2")
    assert "--control was off and is guarded" in complaint(capfd, *files, "--seed", "1", "--control", "guarded")
    monkeypatch.delattr(engine, "load")
    assert main([*files, "--seed", "1"]) == 0
    assert "0 answered, 0 error rows, 2 done before" in capfd.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == rows


def test_a_real_model_answers_and_a_changed_one_is_refused(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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
    assert "the digest of the model's files was" in complaint(capfd, *files)


def test_a_second_job_leaves_everything_as_it_is(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused whatever its settings are, before it writes a manifest or counters."""
    counters = tmp_path / "counters"
    seen = []

    def contents() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class Watching(PaperModel):
        def warm_up(self) -> None:  # the first job still loads
            seen.append(contents())
            assert "is being written by another job" in complaint(
                capfd, *files, "--metrics", str(counters), "--seed", "5"
            )
            seen.append(contents())

    monkeypatch.setattr(engine, "load", lambda *_, **__: Watching())
    counters.write_text("counted")
    assert main(files) == 0
    assert seen[0] == seen[1] and seen[0]["counters"] == b"counted"


@pytest.mark.usefixtures("paper")
def test_what_changes_bits_is_a_setting(files: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(files) == 0
    assert "--max-num-seqs was 8 and is 4" in complaint(capfd, *files, "--max-num-seqs", "4")
    for same in (
        ["--max-num-seqs", "8"],
        ["--replicas", "2"],
        ["--num-pages", "99"],
        ["--max-num-batched-tokens", "9"],
    ):
        assert main([*files, *same]) == 0


@pytest.mark.usefixtures("paper")
def test_another_device_is_another_setting(
    files: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(files) == 0
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "the kind of device was cpu and is gpu" in complaint(capfd, *files)


@pytest.mark.usefixtures("paper")
def test_another_spelling_of_the_model_goes_on(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bundled_folder(), tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for spelling in ("model", "./model/", str(tmp_path / "model"), "link"):
        assert main([*files, "--model", spelling]) == 0


@pytest.mark.usefixtures("paper")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_device_is_named(files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "/dev/full is not a regular file" in complaint(capfd, *files[:2], "-o", "/dev/full")
    assert "/dev/full is not a regular file" in complaint(capfd, *files, "--metrics", "/dev/full")
    (tmp_path / "out.jsonl").symlink_to("/dev/full")
    assert "out.jsonl is not a regular file" in complaint(capfd, *files)


def test_a_name_too_long_for_its_manifest_is_refused(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("x" * 250, "x" * 300):  # with what a manifest adds, or alone
        assert "cannot be written (File name too long)" in complaint(capfd, *files[:2], "-o", str(tmp_path / name))
    assert "File name too long" in complaint(capfd, *files, "--metrics", str(tmp_path / ("x" * 300)))
    assert "File name too long" in complaint(capfd, "-i", str(tmp_path / ("x" * 300)), *files[2:])
    assert [file.name for file in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("shortage", "told"),
    [
        (MemoryError(), "No memory is left"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4294967296 bytes."),
            "No memory is left",
        ),
        (RuntimeError("can't start new thread"), "The system starts no more threads"),
    ],
)
def test_a_shortage_is_a_sentence_and_loses_no_row(
    shortage: Exception,
    told: str,
    files: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
def test_rows_that_no_line_asks_for_are_told_of_and_stay(
    files: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
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

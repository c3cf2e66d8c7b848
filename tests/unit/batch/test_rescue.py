"""An output that somebody takes away while a job writes it: said loudly, and its rows kept."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from et_jax.batch import journal as journals
from et_jax.batch import rescue as rescues
from et_jax.batch.journal import Journal, open_journal
from et_jax.batch.manifest import manifest_path
from et_jax.errors import UsageError

SETTINGS = {"model_files": "abc"}


def row(name: str) -> dict[str, Any]:
    return {"id": f"batch_req_{name}", "custom_id": name, "response": {}, "error": None}


def data(*names: str) -> bytes:
    return b"".join(json.dumps(row(name)).encode() + b"\n" for name in names)


def names_in(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def disturbed(path: Path, disturb: Callable[[], object], then: Callable[[Journal], object]) -> str:
    """What is said of an output of a row of an earlier job and one of this, disturbed before `then`."""
    if not path.exists():
        with open_journal(path, SETTINGS) as journal:
            journal.append(row("a"))
    with pytest.raises(UsageError) as caught, open_journal(path, SETTINGS) as journal:
        journal.append(row("b"))
        disturb()
        then(journal)
    said = str(caught.value)
    assert said.startswith(f"{path} ") and said.endswith(".") and "\n" not in said
    return said


def end(_: Journal) -> None:
    """Do nothing more."""


def append(journal: Journal) -> None:
    journal.append(row("c"))


def sync(journal: Journal) -> None:
    journal.sync()


def replace(path: Path) -> None:
    path.with_name("new").write_text("a letter\n")
    os.replace(path.with_name("new"), path)


@pytest.mark.parametrize(("then", "names"), [(end, ["a", "b"]), (sync, ["a", "b"]), (append, ["a", "b", "c"])])
@pytest.mark.parametrize(("take", "word"), [(os.unlink, "removed"), (replace, "replaced by another file")])
def test_a_file_that_is_gone_is_kept_beside_its_place(tmp_path, then, names, take, word):
    path, rescued = tmp_path / "out.jsonl", tmp_path / "out.jsonl.rescued"
    said = disturbed(path, lambda: take(path), then)
    assert f"was {word} while the job ran; its {len(names)} rows are kept in {rescued}" in said
    assert rescued.read_bytes() == data(*names)
    if word != "removed":
        assert path.read_text() == "a letter\n"
    os.replace(rescued, path)
    with open_journal(path, SETTINGS) as journal:
        assert list(journal.recorded) == names


def test_nothing_is_rescued_over_another_file(tmp_path):
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.rescued").write_text("mine")
    (tmp_path / "out.jsonl.rescued.2").symlink_to("nowhere")
    (tmp_path / "out.jsonl.rescued.3.manifest.json").write_text("mine")
    said = disturbed(path, path.unlink, append)
    assert f"{tmp_path / 'out.jsonl.rescued.4'}:" in said
    assert names_in(tmp_path / "out.jsonl.rescued.4") == ["a", "b", "c"]
    assert (tmp_path / "out.jsonl.rescued").read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_a_file_that_moved_is_named_where_it_is(tmp_path):
    (tmp_path / "here").mkdir()
    path, moved = tmp_path / "here" / "out.jsonl", tmp_path / "there" / "out.jsonl"
    for then in (end, sync, append):
        said = disturbed(path, lambda: os.rename(tmp_path / "here", tmp_path / "there"), then)
        assert f"was moved to {moved} while the job ran" in said and not (tmp_path / "here").exists()
        assert names_in(moved)[:2] == ["a", "b"]
        moved.write_bytes(data("a"))
        os.rename(tmp_path / "there", tmp_path / "here")


def test_the_manifest_is_written_again_beside_rescued_rows(tmp_path, monkeypatch):
    """In the folder of the output, or where that is gone too in the working directory."""
    (tmp_path / "here").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "here" / "out.jsonl"

    def both() -> None:
        path.unlink()
        manifest_path(path).unlink()

    rescued = tmp_path / "here" / "out.jsonl.rescued"
    assert f"are kept in {rescued}: put that" in disturbed(path, both, append)
    os.rename(rescued, path)
    with open_journal(path, SETTINGS) as journal:
        assert list(journal.recorded) == ["a", "b", "c"]
    path.write_bytes(data("a"))
    rescued = tmp_path / "work" / "out.jsonl.rescued"
    said = disturbed(path, lambda: shutil.rmtree(tmp_path / "here"), append)
    assert f"are kept in {rescued}: put that and {manifest_path(rescued)} in its place" in said
    with open_journal(rescued, SETTINGS) as journal:
        assert list(journal.recorded) == ["a", "b", "c"]


def test_rows_that_nothing_can_keep_are_told_of(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def fill() -> None:
        path.unlink()
        monkeypatch.setattr(rescues.os, "write", full)

    said = disturbed(path, fill, end)
    assert "its 2 rows could not be kept (No space left on device)" in said
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl.manifest.json"]


def scribble(path: Path) -> None:
    with path.open("a") as file:
        file.write("a note\n")


@pytest.mark.parametrize("then", [end, sync, append])
@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda path: os.truncate(path, 0), b""),
        (lambda path: os.truncate(path, 10), data("a", "b")[:10]),
        (scribble, data("a", "b") + b"a note\n"),
    ],
    ids=["emptied", "cut", "written to"],
)
def test_a_file_that_another_changes_is_told_of_and_nothing_is_written_after(tmp_path, then, change, left):
    path = tmp_path / "out.jsonl"
    said = disturbed(path, lambda: change(path), then)
    size = len(data("a", "b"))
    assert f"was changed by another program while the job ran (it has {len(left)} bytes, not {size})" in said
    assert path.read_bytes() == left


def test_the_loss_is_told_though_the_job_was_interrupted(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(UsageError, match="removed"), open_journal(path, SETTINGS) as journal:
        journal.append(row("a"))
        path.unlink()
        raise KeyboardInterrupt
    assert names_in(tmp_path / "out.jsonl.rescued") == ["a"]


@pytest.mark.parametrize("then", [end, sync])
def test_a_manifest_that_is_gone_is_written_again(tmp_path, then, capfd):
    path = tmp_path / "out.jsonl"
    for change in (Path.unlink, lambda file: file.write_text("[]")):
        with open_journal(path, SETTINGS) as journal:
            kept = manifest_path(path).read_bytes()
            change(manifest_path(path))
            then(journal)
            assert then is end or manifest_path(path).read_bytes() == kept
        assert manifest_path(path).read_bytes() == kept
        assert re.search(r"out\.jsonl\.manifest\.json was .* while the job ran", capfd.readouterr().err)


def test_a_write_and_its_repair_that_both_fail_end_in_a_sentence(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    refusal = pytest.raises(UsageError, match=r"cannot be written \(Input/output error\)")
    with refusal, open_journal(path, SETTINGS) as journal:
        journal.append(row("a"))
        monkeypatch.setattr(journals.os, "write", broken)
        monkeypatch.setattr(journals.os, "ftruncate", broken)
        journal.append(row("b"))
    assert names_in(path) == ["a"]


def test_a_file_replaced_just_before_it_is_locked_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    path.touch()
    lock = journals.fcntl.flock

    def late(file: int, operation: int) -> None:
        replace(path)
        lock(file, operation)

    monkeypatch.setattr(journals.fcntl, "flock", late)
    with pytest.raises(UsageError, match="was replaced"), open_journal(path, SETTINGS):
        pass
    assert path.read_text() == "a letter\n"

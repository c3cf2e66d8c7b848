"""An output that is taken away or changed while a job writes it: reported, and its rows kept."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_rows import SETTINGS, begin, data, recorded, row

from et_jax.batch import journal as journals
from et_jax.batch import rescue as rescues
from et_jax.batch.journal import Journal, open_journal
from et_jax.batch.manifest import manifest_path
from et_jax.errors import UsageError


def end(_: Journal) -> None:
    """Do nothing more."""


def append(journal: Journal) -> None:
    journal.append(row("c"))


def disturbed(path: Path, disturb: Callable[[], object], then: Callable[[Journal], object] = append) -> str:
    """What is said of an output with a row of an earlier job and one of this, disturbed before `then`."""
    begin(path, "a")
    with pytest.raises(UsageError) as caught, open_journal(path, SETTINGS) as journal:
        journal.append(row("b"))
        disturb()
        then(journal)
    said = str(caught.value)
    assert said.startswith(f"{path} ") and said.endswith(".") and "\n" not in said
    return said


def replace(path: Path) -> None:
    path.with_name("new").write_text("a letter\n")
    os.replace(path.with_name("new"), path)


def interrupt(_: Journal) -> None:
    raise KeyboardInterrupt


THEN = pytest.mark.parametrize("then", [end, Journal.sync, append, interrupt])


@THEN
@pytest.mark.parametrize(("take", "word"), [(os.unlink, "removed"), (replace, "replaced by another file")])
def test_a_file_that_is_gone_is_kept_beside_its_place(tmp_path, then, take, word):
    path, rescued = tmp_path / "out.jsonl", tmp_path / "out.jsonl.rescued"
    names = ["a", "b", "c"][: 2 + (then is append)]
    said = disturbed(path, lambda: take(path), then)
    assert f"was {word} while the job ran; its {len(names)} rows are kept in {rescued}: put that in its place" in said
    assert rescued.read_bytes() == data(*names)
    assert not path.exists() or path.read_text() == "a letter\n"
    os.replace(rescued, path)
    assert recorded(path) == names


def test_nothing_is_rescued_over_another_file(tmp_path):
    path = tmp_path / "out.jsonl"
    (tmp_path / "out.jsonl.rescued").write_text("mine")
    (tmp_path / "out.jsonl.rescued.2").symlink_to("nowhere")
    (tmp_path / "out.jsonl.rescued.3.manifest.json").write_text("mine")
    assert f"{tmp_path / 'out.jsonl.rescued.4'}:" in disturbed(path, path.unlink)
    assert (tmp_path / "out.jsonl.rescued.4").read_bytes() == data("a", "b", "c")
    assert (tmp_path / "out.jsonl.rescued").read_text() == "mine" and not (tmp_path / "nowhere").exists()


@THEN
def test_a_file_that_moved_is_named_where_it_is(tmp_path, then):
    (tmp_path / "here").mkdir()
    path, moved = tmp_path / "here" / "out.jsonl", tmp_path / "there" / "out.jsonl"
    said = disturbed(path, lambda: os.rename(tmp_path / "here", tmp_path / "there"), then)
    assert f"was moved to {moved} while the job ran" in said and not (tmp_path / "here").exists()
    assert recorded(moved)[:2] == ["a", "b"]


def test_a_manifest_that_went_too_is_written_again_in_whatever_folder_is_left(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    path = tmp_path / "here" / "out.jsonl"

    def both() -> None:
        path.unlink()
        manifest_path(path).unlink()

    rescued = tmp_path / "here" / "out.jsonl.rescued"
    assert f"are kept in {rescued}: put that in its place" in disturbed(path, both)
    os.rename(rescued, path)
    assert recorded(path) == ["a", "b", "c"]
    path.unlink()
    rescued = tmp_path / "work" / "out.jsonl.rescued"
    said = disturbed(path, lambda: shutil.rmtree(tmp_path / "here"))
    assert f"are kept in {rescued}: put that and {manifest_path(rescued)} in its place" in said
    assert recorded(rescued) == ["a", "b", "c"]


def scribble(path: Path) -> None:
    with path.open("a") as file:
        file.write("a note\n")


@THEN
@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda path: os.truncate(path, 0), b""),
        (lambda path: os.truncate(path, 10), data("a", "b")[:10]),
        (scribble, data("a", "b") + b"a note\n"),
    ],
    ids=["emptied", "cut", "written to"],
)
def test_a_file_that_another_program_changes_is_reported_and_nothing_is_written_after(tmp_path, then, change, left):
    path, size = tmp_path / "out.jsonl", len(data("a", "b"))
    said = disturbed(path, lambda: change(path), then)
    assert f"was changed by another program while the job ran (it has {len(left)} bytes, not {size})" in said
    assert path.read_bytes() == left


@pytest.mark.parametrize("then", [end, Journal.sync])
@pytest.mark.parametrize("change", [Path.unlink, lambda file: file.write_text("[]")])
def test_a_manifest_that_is_gone_is_written_again(tmp_path, then, change, capfd):
    path = tmp_path / "out.jsonl"
    with open_journal(path, SETTINGS) as journal:
        kept = manifest_path(path).read_bytes()
        change(manifest_path(path))
        then(journal)
        assert then is end or manifest_path(path).read_bytes() == kept
    assert manifest_path(path).read_bytes() == kept
    assert re.search(r"out\.jsonl\.manifest\.json was .* while the job ran", capfd.readouterr().err)


def failing(*_: Any) -> None:
    raise OSError(5, "Input/output error")


def test_a_disk_that_takes_nothing_ends_in_a_sentence(tmp_path, monkeypatch):
    """Neither a row nor its repair, nor the copy of a file that is gone."""
    path = tmp_path / "out.jsonl"
    with (
        pytest.raises(UsageError, match=r"cannot be written \(Input/output error\)"),
        open_journal(path, SETTINGS) as journal,
        monkeypatch.context() as patch,
    ):
        journal.append(row("a"))
        patch.setattr(journals.os, "write", failing)
        patch.setattr(journals.os, "ftruncate", failing)
        journal.append(row("b"))
    assert path.read_bytes() == data("a")
    path.unlink()

    def fill() -> None:
        path.unlink()
        monkeypatch.setattr(rescues.os, "write", failing)

    assert "its 2 rows could not be kept (Input/output error)" in disturbed(path, fill, end)
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl.manifest.json"]


def test_a_file_replaced_just_before_it_is_locked_is_not_written(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    path.touch()
    lock = journals.fcntl.flock

    def late(file: int, operation: int) -> None:
        replace(path)
        lock(file, operation)

    monkeypatch.setattr(journals.fcntl, "flock", late)
    with pytest.raises(UsageError, match="was replaced"):
        begin(path)
    assert path.read_text() == "a letter\n"

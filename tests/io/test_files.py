"""Files that are whole or not there."""

import os
from pathlib import Path

import pytest

from et_jax.errors import UsageError
from et_jax.io.files import check_replaceable, replace_file


def test_no_other_file_is_touched(tmp_path: Path) -> None:
    for name in ("a", "a.new", "a.tmp", "b"):
        (tmp_path / name).write_text("mine")
    replace_file(tmp_path / "a", "text")
    check_replaceable(tmp_path / "b")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {
        "a": "text",
        "a.new": "mine",
        "a.tmp": "mine",
        "b": "mine",
    }


def test_a_link_stays_and_points_to_the_new_text(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/a")
    for text in ("one", "two"):
        replace_file(tmp_path / "link", text)
        assert (tmp_path / "there" / "a").read_text() == text and (tmp_path / "link").is_symlink()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match=r"a cannot be written \(No space left on device\)"):
        replace_file(tmp_path / "a", "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "old")]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "a", tmp_path, Path("/dev/null")):
        for refuse in (check_replaceable, lambda path: replace_file(path, "text")):
            with pytest.raises(UsageError, match=r"cannot be written|not a regular file"):
                refuse(path)
    assert not list(tmp_path.iterdir())

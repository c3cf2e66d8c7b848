"""Files that are whole or not there."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from et_jax.errors import UsageError
from et_jax.io.files import check_writable, replace_file, replace_picture


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def test_no_other_file_is_touched_and_permissions_stay(tmp_path):
    before = dict.fromkeys(("a", "a.new", "a.tmp", "b"), "mine")
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "a").chmod(0o640)
    replace_file(tmp_path / "a", b"text")
    check_writable(tmp_path / "b")
    assert contents(tmp_path) == before | {"a": "text"} and (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_a_link_stays_and_points_to_the_new_text(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/a")
    for text in ("one", "two"):
        replace_file(tmp_path / "link", text)
        assert (tmp_path / "there" / "a").read_text() == text and (tmp_path / "link").is_symlink()


def hostile(folder: Path) -> list[str]:
    """Names that no file can have that is written whole: of folders, devices, nothing, too long, in a circle."""
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    (folder / "file").write_text("mine")
    long = [str(folder / ("x" * 300)), "x/" * 3000 + "a"]
    absent = [str(folder / "no" / "a"), str(folder / "file" / "a"), "/proc/nowhere"]
    folders = [".", "..", "/", str(folder), f"{folder}/new/"]
    return [*folders, *absent, *long, str(folder / "one"), "a\0b", "\ud800", "/dev/null", "/dev/full"]


def test_where_nothing_can_be_written(tmp_path):
    names = hostile(tmp_path)
    before = sorted(tmp_path.iterdir())
    for path in names:
        for refuse in (check_writable, lambda path: replace_file(path, "text")):
            with pytest.raises(UsageError, match=r"(cannot be written|a folder|not a regular file).*; choose another"):
                refuse(path)
        if not path.startswith("/dev/"):
            with pytest.raises(UsageError, match=r"(cannot be written|a folder).*; choose another file\.$"):
                check_writable(path, grows=True)
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "file").read_text() == "mine"
    check_writable("/dev/null", grows=True)


def test_a_file_that_may_not_be_changed_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("mine")
    check_writable(tmp_path / "a", grows=True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # which a superuser is not told of any file
    for refuse in (check_writable, lambda path: check_writable(path, grows=True), lambda path: replace_file(path, "")):
        with pytest.raises(UsageError, match="Permission denied"):
            refuse(tmp_path / "a")
    assert contents(tmp_path) == {"a": "mine"}


@pytest.mark.parametrize("suffix", ["", ".png"])
def test_a_write_that_fails_leaves_the_old_file_and_an_interrupted_one_nothing(suffix, tmp_path, monkeypatch):
    def write(path: Path, text: str) -> None:
        if not suffix:
            return replace_file(path, text)
        figure = SimpleNamespace(savefig=lambda file, format: file.write(f"{text} as {format}".encode()))
        return replace_picture(path, figure)  # type: ignore[arg-type]

    old = {f"a{suffix}": "old as png" if suffix else "old"}
    write(tmp_path / f"a{suffix}", "old")
    for error, raised in ((OSError(28, "No space left on device"), UsageError), (KeyboardInterrupt, KeyboardInterrupt)):
        monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=error))
        for name in ("a", "new"):
            with pytest.raises(raised, match=r"cannot be written \(No space" if raised is UsageError else None):
                write(tmp_path / f"{name}{suffix}", "new")
        assert contents(tmp_path) == old

"""Files that are whole or not there."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from et_jax.errors import UsageError
from et_jax.io.files import check_writable, replace_file, replace_picture


def test_no_other_file_is_touched(tmp_path: Path) -> None:
    for name in ("a", "a.new", "a.tmp", "b"):
        (tmp_path / name).write_text("mine")
    replace_file(tmp_path / "a", "text")
    check_writable(tmp_path / "b")
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


def hostile(folder: Path) -> list[str]:
    """Names that no file can have that is written whole: of folders, devices, nothing, too long, in a circle."""
    (folder / "one").symlink_to("two")
    (folder / "two").symlink_to("one")
    (folder / "file").write_text("mine")
    long = [str(folder / ("x" * 300)), "x/" * 3000 + "a"]
    absent = [str(folder / "no" / "a"), str(folder / "file" / "a"), "/proc/nowhere"]
    folders = [".", "..", "/", str(folder), f"{folder}/new/"]
    return [*folders, *absent, *long, str(folder / "one"), "a\0b", "\ud800", "/dev/null", "/dev/full"]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
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


def test_a_file_that_may_not_be_changed_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("mine")
    check_writable(tmp_path / "a", grows=True)
    monkeypatch.setattr(os, "access", lambda *_: False)  # which a superuser is not told of any file
    for refuse in (check_writable, lambda path: check_writable(path, grows=True), lambda path: replace_file(path, "")):
        with pytest.raises(UsageError, match="Permission denied"):
            refuse(tmp_path / "a")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a", "mine")]


def test_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "a").chmod(0o640)
    replace_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640 and (tmp_path / "a").read_bytes() == b"new"


def test_an_interrupt_leaves_nothing_beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_file(tmp_path / "a", "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_is_whole_or_not_there(
    suffix: str, begins: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = SimpleNamespace(savefig=lambda file, format: file.write(begins + format.encode()))
    path = tmp_path / f"a{suffix}"
    replace_picture(path, figure)  # type: ignore[arg-type]
    assert path.read_bytes() == begins + suffix[1:].encode()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        replace_picture(path, SimpleNamespace(savefig=lambda file, format: file.write(b"half")))  # type: ignore[arg-type]
    assert path.read_bytes().startswith(begins) and len(list(tmp_path.iterdir())) == 1

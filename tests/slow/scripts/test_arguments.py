"""Arguments of scripts, refused before a model is loaded."""

import argparse
from pathlib import Path

import pytest

from scripts.measuring import arguments


def refused(kind, *values: str) -> None:
    for value in values:
        with pytest.raises((argparse.ArgumentTypeError, ValueError)):
            kind(value)


def test_counts_are_whole_and_positive():
    assert [arguments.count()("1"), arguments.count(0)("0"), arguments.count(2)("2147483647")] == [1, 0, 2**31 - 1]
    refused(arguments.count(), "0", "-1", "1.5", "", "2147483648", "9" * 4000, "nan")
    refused(arguments.count(4), "3")


def test_places_are_checked_as_they_are_read(tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    assert arguments.output(str(tmp_path / "new" / "a.json")) == tmp_path / "new" / "a.json"
    assert arguments.folder(str(tmp_path)) == tmp_path and not list((tmp_path / "new").iterdir())
    refused(arguments.output, "", ".", "/", str(tmp_path), str(tmp_path / "file" / "a"), str(tmp_path / ("x" * 300)))
    refused(arguments.folder, "", str(tmp_path / "file"), str(tmp_path / "absent"), "a\0b")

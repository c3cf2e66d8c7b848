"""Texts as they are cut."""

import gzip

import pytest

from et_jax.errors import UsageError
from scripts.measuring import text as held_out


def test_stories_are_parted_by_single_line_breaks(tmp_path):
    (tmp_path / "stories.txt").write_text("One.\n\nStill one.\nTwo.\n")
    assert held_out.texts(tmp_path / "stories.txt") == ["One.\n\nStill one.", "Two."]


def test_what_is_no_text_is_named(tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "blank").write_text("\n\n \n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "packed.gz").write_bytes(gzip.compress(b"It was."))
    for name in ("empty", "blank", "folder", "packed.gz", "absent", "x" * 300):
        with pytest.raises(UsageError, match=rf"^The text .*/{name} .*; name a text file\.$"):
            held_out.texts(tmp_path / name)

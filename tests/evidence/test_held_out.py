"""Texts as they are cut."""

import pytest

from et_jax.errors import UsageError
from et_jax.evidence import held_out


def test_stories_are_parted_by_single_line_breaks(tmp_path):
    (tmp_path / "stories.txt").write_text("One.\n\nStill one.\nTwo.\n")
    assert held_out.texts(tmp_path / "stories.txt") == ["One.\n\nStill one.", "Two."]
    with pytest.raises(UsageError, match="is not there"):
        held_out.texts(tmp_path / "absent.txt")

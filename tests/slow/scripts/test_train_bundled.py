"""What the training's command line refuses about teachers, before it reads a corpus."""

import sys

import pytest
from scripts_here import script


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--recipe", "small"), "needs one: give it --teacher bundled"),
        (("--recipe", "long", "--teacher", "bundled"), "Only --recipe small"),
        (("--recipe", "small", "--teacher", "bundled-small"), "the student's own folder"),
        (("--recipe", "small", "--teacher", "bundled", "--from", "bundled"), "the student's own folder"),
        (("--recipe", "small", "--teacher", "bundled", "--longest", "4096"), "--longest belongs to --recipe long"),
    ],
)
def test_a_teacher_that_makes_no_sense_is_refused_in_a_sentence(given, words, monkeypatch, tmp_path):
    arguments = ["train_bundled.py", *given, "--folder", str(tmp_path / "run"), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=words):
        script("train_bundled").main()
    assert not (tmp_path / "run").exists()

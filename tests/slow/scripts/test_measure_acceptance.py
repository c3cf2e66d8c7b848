"""What the measurement of drafts reads."""

from scripts_here import script

measure = script("measure_acceptance")


def test_a_file_is_one_text(tmp_path):
    (tmp_path / "play.txt").write_text("One.\nTwo.\n\nThree.")
    assert measure.works(tmp_path / "play.txt") == ["One.\nTwo.\n\nThree."]

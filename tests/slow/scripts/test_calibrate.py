"""The script that measures a model: what it refuses, before a model is loaded."""

import gzip
import sys

import pytest
from scripts_here import script


def test_what_cannot_be_measured_ends_in_a_sentence(tmp_path, monkeypatch, capsys):
    calibrate = script("calibrate")
    monkeypatch.setattr(calibrate, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "empty").write_text("")
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(b"It was."))
    (tmp_path / "torn.tar.gz").write_bytes(gzip.compress(b"It was.")[:20])
    (tmp_path / "folder.tar").mkdir()
    (tmp_path / "text").write_text("It was.\n")
    texts = [str(tmp_path / name) for name in ("empty", "packed.txt.gz", "torn.tar.gz", "folder.tar", "absent", "")]
    given = [(["--text", text], text) for text in texts]
    given += [(["--text", str(tmp_path / "text"), "--rows", rows], "--rows") for rows in ("0", "-1", "9" * 30)]
    given += [(["--text", str(tmp_path / "text"), "--output", name], "--output") for name in ("", "absent")]
    for arguments, named in given:
        monkeypatch.setattr(sys, "argv", ["calibrate", *arguments])
        try:
            code = calibrate.main()
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr().err.splitlines()[-1]
        assert code == 2 and "error: " in said and named in said

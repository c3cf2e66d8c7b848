"""The script that measures a model: what it refuses, before a model is loaded."""

import gzip
import sys

import pytest
from scripts_here import script


def test_what_cannot_be_measured_ends_in_a_sentence(tmp_path, monkeypatch, capsys):
    calibrate = script("calibrate")
    monkeypatch.setattr(calibrate, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "torn.tar.gz").write_bytes(gzip.compress(b"It was.")[:20])
    for arguments, named in ((["--text", str(tmp_path / "torn.tar.gz")], "torn.tar.gz"), (["--text", ""], "")):
        monkeypatch.setattr(sys, "argv", ["calibrate", *arguments])
        try:
            code = calibrate.main()
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr().err.splitlines()[-1]
        assert code == 2 and "error: " in said and named in said

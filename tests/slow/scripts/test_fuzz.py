"""Fuzzing: a short run passes, and each kind of failure is one."""

import sys

import pytest

from et_jax.errors import UsageError
from scripts import fuzz


def ended(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *arguments])
    return fuzz.main(), capsys.readouterr().out


def test_a_short_run_finds_nothing(monkeypatch, capsys):
    code, said = ended(monkeypatch, capsys, "--cases", "30")
    assert code == 0 and "accepted" in said and "refused" in said


@pytest.mark.parametrize(("error", "outcome"), [(ValueError("torn"), "traceback"), (UsageError("No"), "no sentence")])
def test_what_is_refused_otherwise_is_a_failure(error, outcome, monkeypatch, capsys):
    def torn(*_):
        raise error

    monkeypatch.setattr(fuzz, "opened", torn)
    code, said = ended(monkeypatch, capsys, "--only", "3")
    assert code == 1 and f"1 {outcome}" in said


def test_what_takes_too_long_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "SECONDS", 0.0)
    code, said = ended(monkeypatch, capsys, "--cases", "1")
    assert code == 1 and "1 hang or crash" in said

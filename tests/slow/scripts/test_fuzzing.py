"""Fuzzing: each verdict is reached where its fault is planted, no worker outlives its parent, a short run passes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import planted_faults
import pytest
from places import ROOT
from scripts_here import script

from scripts.fuzzing import edits
from scripts.fuzzing.watch import draw, run_cases

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_every_verdict_is_reached_and_a_case_follows_from_its_number():
    """The worker draws its cases in a process of its own, from the target's name, the seed and the number."""
    cases = {number: draw(planted_faults, 0, number)["what"] for number in range(200)}
    first = {case: number for number, case in reversed(cases.items())}
    assert first.keys() == planted_faults.VERDICTS.keys()
    rows = list(run_cases("planted_faults", 0, sorted(first.values()), memory=200 * 2**20))
    assert {cases[row["number"]]: row["outcome"] for row in rows} == planted_faults.VERDICTS
    details = {cases[row["number"]]: row["detail"] for row in rows}
    assert "planted_faults.py" in details["hangs"]
    assert "killed at 0." in details["grows"]
    assert details["raises"].endswith(" run: ValueError: wrong")
    assert [draw(planted_faults, 1, number)["what"] for number in cases] != list(cases.values())


def test_a_worker_ends_with_its_parent(tmp_path):
    """The parent is killed while its worker runs a case."""
    (tmp_path / "endless.py").write_text(
        "import os, time\n"
        "def draw(random):\n"
        "    return {}\n"
        "def prepare(folder):\n"
        f"    return lambda: open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n') and time.sleep(60)\n"
    )
    program = (
        "from scripts.fuzzing.watch import run_cases\nif __name__ == '__main__': [*run_cases('endless', 0, [0])]\n"
    )
    (tmp_path / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent, pid = subprocess.Popen([sys.executable, str(tmp_path / "program.py")], env=environment), tmp_path / "pid"
    while not pid.exists() or not pid.read_text().endswith("\n"):
        assert parent.poll() is None
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    worker, ends = Path("/proc", pid.read_text().strip(), "stat"), time.monotonic() + 30
    while worker.exists() and " Z " not in worker.read_text():
        assert time.monotonic() < ends, "the worker outlives its parent"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("kind", "place", "value", "after"),
    [
        ("replace", 0, "1e400", b'{"a": 1e400, "b": [2, 3]}'),  # which JSON cannot hold
        ("duplicate", 1, "NaN", b'{"a": 1, "b": [2, 3], "b": NaN}'),
        ("delete", 0, "null", b'{"b": [2, 3]}'),
    ],
)
def test_an_edit_changes_its_place(kind, place, value, after):
    changes = [edits.Edit(kind, place, 1, value)]
    assert edits.mutated(b'{"a": 1, "b": [2, 3]}', changes) == after


def test_a_damage_is_at_its_share_of_the_length():
    assert edits.mutated(b"abc", [edits.Damage("flip", 400_000, b"\1")]) == b"a\x60c"


def test_a_short_run_finds_nothing(tmp_path, monkeypatch, capsys):
    """A few cases of every target, with the report that a long run leaves."""
    report = tmp_path / "fuzz.json"
    arguments = ["--cases", "35", "--output", str(report)]
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT))
    assert script("fuzz").main() == 0, capsys.readouterr()
    values = json.loads(report.read_text())
    assert values["failures"] == []
    assert sum(sum(counted.values()) for counted in values["targets"].values()) == 35
    assert all(counted.get("refused") for counted in values["targets"].values())

"""Fuzzing: each verdict is reached where its fault is planted, a killed run continues, a short run finds nothing."""

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


def test_a_killed_run_continues_without_repeating_a_case(tmp_path):
    """The parent is killed amid its cases, and its last row is torn by hand; no worker outlives it."""
    program = (
        "import sys; from pathlib import Path; from scripts import fuzz\n"
        "if __name__ == '__main__': fuzz.run('slow', 'slow_cases', 0, 40, Path(sys.argv[1]) / 'cases.jsonl')\n"
    )
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "slow_cases.py").write_text(
        "import os, time\n"
        f"log = {str(tmp_path / 'ran.txt')!r}\n"
        "def draw(random):\n"
        "    return {}\n"
        "def prepare(folder):\n"
        "    open(log + '.pid', 'w').write(str(os.getpid()))\n"
        "    def run():\n"
        "        open(log, 'a').write('ran\\n'); time.sleep(0.05)\n"
        "        return 'accepted'\n"
        "    return run\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    first, journal = subprocess.Popen(command, env=environment), tmp_path / "cases.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 9:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    worker = Path("/proc", (tmp_path / "ran.txt.pid").read_text(), "stat")
    ends = time.monotonic() + 30
    while worker.exists() and " Z " not in worker.read_text():
        assert time.monotonic() < ends, "the worker outlives its parent"
        time.sleep(0.05)
    with journal.open("ab") as file:
        file.write(b'{"number": 3, "out')
    subprocess.run(command, env=environment, check=True)
    numbers = [json.loads(line)["number"] for line in journal.read_bytes().splitlines()]
    assert sorted(numbers) == list(range(40))
    # once more at most the case amid which it was killed, and one on its way
    assert (tmp_path / "ran.txt").read_text().count("ran") <= 42


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
    arguments = ["--cases", "35", "--work", str(tmp_path), "--output", str(report)]
    monkeypatch.setattr(sys, "argv", ["fuzz.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT))
    assert script("fuzz").main() == 0, capsys.readouterr()
    values = json.loads(report.read_text())
    assert values["failures"] == []
    assert sum(sum(counted.values()) for counted in values["targets"].values()) == 35
    assert all(counted.get("refused") for counted in values["targets"].values())

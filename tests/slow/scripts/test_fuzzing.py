"""Fuzzing: each verdict is reached where its fault is planted, a killed run goes on, and a short run finds nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import planted_faults
import pytest
from fuzzing import edits, watch
from fuzzing.cases import draw
from fuzzing.watch import run_cases
from places import HELPERS, ROOT

pytestmark = pytest.mark.usefixtures("hardly_optimised")

VERDICTS = {
    "works": "accepted",
    "refuses": "refused",
    "hangs": "hang",
    "is deaf": "hang",  # to the timer in its own process: its parent ends it
    "grows": "memory",
    "has it eaten": "memory",  # by a process of its own
    "raises": "traceback",
    "panics": "traceback",
    "eats": "memory",
    "dies": "crash",
    "prints": "noise",
    "rambles": "sentence",
    "harms": "neighbour",
}


def drawn(count: int) -> dict[int, str]:
    return {number: draw(planted_faults.SURFACE, 0, "planted", number) for number in range(count)}


def test_every_verdict_is_reached_and_the_worker_starts_anew():
    cases = drawn(200)
    first = {case: number for number, case in reversed(cases.items())}  # each fault once
    assert first.keys() == VERDICTS.keys()
    told = []
    rows = list(run_cases("planted_faults", "planted", 0, sorted(first.values()), memory=200 * 2**20, tell=told.append))
    assert {cases[row["number"]]: row["outcome"] for row in rows} == VERDICTS
    by_case = {cases[row["number"]]: row for row in rows}
    assert "planted_faults.py" in by_case["hangs"]["detail"]
    assert "killed at 0." in by_case["grows"]["detail"]
    assert by_case["raises"]["detail"].endswith(" run: ValueError: wrong")
    assert sum("the worker starts anew" in line for line in told) >= 6  # a hang is tried twice


def test_a_case_follows_from_its_seed_surface_and_number_alone():
    """In another process, with other modules loaded and no case before it, the case is the same."""
    program = (
        "from planted_faults import SURFACE; from fuzzing.cases import draw\n"
        "print([draw(SURFACE, 0, 'planted', number) for number in (23, 7)])"
    )
    paths = os.pathsep.join([str(HELPERS), *sys.path])
    alone = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    cases = drawn(24)
    assert alone.stdout.strip() == str([cases[23], cases[7]]), alone.stderr
    other = [draw(planted_faults.SURFACE, 1, "planted", number) for number in range(24)]
    assert other != list(cases.values())


def test_a_killed_run_goes_on_without_repeating_a_case(tmp_path):
    """The parent is killed amid its cases; what is done is not done again, and no worker outlives it."""
    program = (
        "import sys; from pathlib import Path; from fuzzing.watch import Campaign, Done, run_cases\n"
        "done = Done(Path(sys.argv[1]) / 'cases.jsonl', Campaign(seed=0, code='planted'))\n"
        "left = [n for n in range(40) if ('planted', n) not in done.rows]\n"
        "for row in run_cases('slow_cases', 'planted', 0, left):\n"
        "    done.add(row)\n"
    )
    (tmp_path / "slow_cases.py").write_text(
        "import os, time; from hypothesis import strategies as st; from fuzzing.cases import Surface\n"
        f"log = {str(tmp_path / 'ran.txt')!r}\n"
        "def prepare(folder):\n"
        "    open(log + '.pid', 'w').write(str(os.getpid()))\n"
        "    def run(case):\n"
        "        open(log, 'a').write('ran\\n'); time.sleep(0.05)\n"
        "        return 'accepted'\n"
        "    return run\n"
        "SURFACE = Surface(cases=st.integers(0, 9), prepare=prepare)\n"
    )
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", program, str(tmp_path)]
    first = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths})
    journal = tmp_path / "cases.jsonl"
    while not journal.exists() or journal.read_bytes().count(b"\n") < 9:
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    worker = int((tmp_path / "ran.txt.pid").read_text())
    ends = time.monotonic() + 30
    while Path(f"/proc/{worker}/stat").exists() and " Z " not in Path(f"/proc/{worker}/stat").read_text():
        assert time.monotonic() < ends, "the worker outlives its parent"
        time.sleep(0.05)
    with journal.open("ab") as file:
        file.write(b'{"surface": "planted", "numb')  # torn by the kill
    subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, check=True)
    numbers = [json.loads(line)["number"] for line in journal.read_bytes().splitlines()[1:]]
    assert sorted(numbers) == list(range(40))
    assert (tmp_path / "ran.txt").read_text().count(
        "ran"
    ) <= 42  # the case amid which it was killed, and one on its way


def test_rows_of_other_code_are_not_gone_on_with(tmp_path):
    watch.Done(tmp_path / "cases.jsonl", watch.Campaign(seed=0, code="a"))
    watch.Done(tmp_path / "cases.jsonl", watch.Campaign(seed=0, code="a"))
    with pytest.raises(ValueError, match="other code"):
        watch.Done(tmp_path / "cases.jsonl", watch.Campaign(seed=0, code="b"))


def test_an_edit_is_where_it_should_be():
    """Expected by hand: a value that JSON cannot hold, a key twice, a key gone."""
    document = b'{"a": 1, "b": [2, 3]}'

    def after(kind: str, place: int, value: str = "null") -> bytes:
        edit = edits.Edit(kind=kind, place=place, other=1, value=value)
        return edits.mutated(document, edits.Mutation(edits=(edit,)))

    assert after("replace", 0, "1e400") == b'{"a": 1e400, "b": [2, 3]}'
    assert after("duplicate", 1, "NaN") == b'{"a": 1, "b": [2, 3], "b": NaN}'
    assert after("delete", 0) == b'{"b": [2, 3]}'
    assert edits.damaged(b"abc", edits.Damage(kind="flip", where=400_000, bytes=b"\1")) == b"a\x60c"


def test_a_short_run_finds_nothing(tmp_path):
    """Every surface, a few cases each, with the report that a long run leaves."""
    command = [sys.executable, str(ROOT / "scripts/fuzz.py"), "--cases", "35", "--seed", "0", "--work", str(tmp_path)]
    report = tmp_path / "fuzz.json"
    root = os.pathsep.join([str(ROOT), *sys.path])
    environment = os.environ | {"PYTHONPATH": root}
    ended = subprocess.run([*command, "--output", str(report)], env=environment, capture_output=True, text=True)
    assert report.exists(), ended.stderr
    values = json.loads(report.read_text())
    assert values["failures"] == [] and ended.returncode == 0
    assert sum(sum(counted.values()) for counted in values["surfaces"].values()) == 35
    assert all(counted.get("refused") for counted in values["surfaces"].values())

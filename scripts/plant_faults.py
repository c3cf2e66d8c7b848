"""Which tests see a fault: put those of tests/faults/*.toml into a copy of the code, one at a time.

    python scripts/plant_faults.py map [PYTEST ARGUMENTS]     # which functions each test enters, by running them
    python scripts/plant_faults.py run [--only FOLDER] [--jobs 2] [PYTEST ARGUMENTS]

`run` gives every fault to tests until one fails: first to the quickest that enter the function it is in, then to all
tests of the files that enter it, for a function that is traced once is entered by the first test alone. Files named for
the fault's module come first. What runs in a process of its own enters nothing, so commands come last, and are tried
for the outer folders alone. PYTEST ARGUMENTS choose the tests of either, such as `-m slow`. Results are added to
benchmarks/results/faults.json by the name of the run (`--name`); a fault that has one there is not tried again. One
whose tests run longer than `SECONDS`, or end pytest itself (as a test of more than `TEST_SECONDS` does), gets none.
"""

import argparse
import ast
import collections
import concurrent.futures
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS, RESULTS = ROOT / "tests/faults", ROOT / "benchmarks/results/faults.json"
COMMANDS, LAWS = "tests/commands", "tests/laws"  # what commands run is in processes of their own
INNER = ("control", "decode", "models")  # commands are not tried for these: they would take minutes, and see little
SECONDS = 1200  # for all tests of one fault
TEST_SECONDS = 200
QUICK = 60.0  # processor seconds of the tests that are tried first
Entered = dict[tuple[str, str], set[str]]  # the tests that enter a function, which is (file, name)


def faults() -> list[dict[str, str]]:
    """Return every fault of the lists. Raises SystemExit for one whose `old` is not exactly once in its file."""
    found = []
    for part in sorted(FAULTS.glob("*.toml")):
        for fault in tomllib.loads(part.read_text(encoding="utf-8"))["fault"]:
            count = (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"])
            if count != 1 or fault["old"] == fault["new"]:
                sys.exit(
                    f"{part.name}: {fault['what']!r}: {fault['file']} has {fault['old']!r} {count} times, not once."
                )
            found.append(fault)
    return found


def function_of(fault: dict[str, str]) -> str | None:
    """Return the outermost function or method that a fault is in, None where it is in none."""
    source = (ROOT / fault["file"]).read_text(encoding="utf-8")
    line = source[: source.index(fault["old"])].count("\n") + 1

    def within(body: list[ast.stmt], before: str) -> str | None:
        for node in body:
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if named and node.lineno <= line <= (node.end_lineno or node.lineno):
                name = before + node.name
                return within(node.body, f"{name}.") if isinstance(node, ast.ClassDef) else name
        return None

    return within(ast.parse(source).body, "")


def make_map(folder: Path, arguments: list[str]) -> None:
    """Run the tests with a plugin that records in `folder` which functions each enters."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{FAULTS}", "ENTERED": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "entered", *arguments]
    subprocess.run(command, cwd=ROOT, env=os.environ | paths)


def read_map(folder: Path) -> tuple[Entered, dict[str, float]]:
    """Return the tests that enter each function, and the processor seconds of each test."""
    entered: Entered = collections.defaultdict(set)
    seconds: dict[str, float] = collections.defaultdict(float)
    for part in folder.glob("*.jsonl"):
        for row in map(json.loads, part.read_text(encoding="utf-8").splitlines()):
            seconds[row["test"]] += row["seconds"]
            for file, name in row["entered"]:
                entered[file, name].add(row["test"])
    return entered, seconds


def tests_of(fault: dict[str, str], entered: Entered, seconds: dict[str, float]) -> tuple[list[str], list[str]]:
    """Return the quick tests that enter the function of a fault, and the test files that could see it, in order."""
    name, module = function_of(fault), Path(fault["file"]).stem
    found = set[str]()
    for (file, function), tests in entered.items():
        if file == fault["file"] and (name is None or function == name or function.startswith(f"{name}.")):
            found |= tests

    def in_order(some: set[str], took: Mapping[str, float]) -> list[str]:
        def turn(one: str) -> tuple[bool, bool, float]:
            return one.startswith(COMMANDS), module not in Path(one.partition("::")[0]).name, took[one]

        return sorted(some, key=turn)

    ordered = in_order(found, seconds)
    spent = itertools.accumulate(seconds[test] for test in ordered)
    quick = [test for test, until in zip(ordered, spent, strict=True) if until < QUICK]
    of_file = collections.Counter[str]()
    for test, took in seconds.items():
        of_file[test.partition("::")[0]] += took
    files = {test.partition("::")[0] for test in found}
    if any(file.startswith(LAWS) for file in files):  # the first law of a model traces it for all
        files |= {file for file in of_file if file.startswith(LAWS)}
    commands = {file for file in of_file if file.startswith(COMMANDS)}
    files = files - commands if Path(fault["file"]).parent.name in INNER else files | commands
    return quick, in_order(files, of_file)


class NoResult(Exception):
    """The tests of a fault said neither that one fails nor that all pass."""


def seen_by(fault: dict[str, str], folder: Path, tests: list[str], arguments: list[str]) -> str | None:
    """Return the first test that fails with a fault in a copy of the code in `folder`; None where none does.

    Raises NoResult if pytest takes longer than `SECONDS`, or ends without a failed test.
    """
    ignored = shutil.ignore_patterns(".venv*", ".git", "site", "runs", "benchmarks/results")
    tree = Path(shutil.copytree(ROOT, folder / "copy", ignore=ignored, symlinks=True, dirs_exist_ok=True))
    place = tree / fault["file"]
    place.write_text(place.read_text(encoding="utf-8").replace(fault["old"], fault["new"]), encoding="utf-8")
    options = ["-p", "unshrunk", "-q", "-x", "--no-header", "--tb=no", f"--timeout={TEST_SECONDS}"]
    command = [sys.executable, "-m", "pytest", *options]
    paths = {"PYTHONPATH": f"{tree}{os.pathsep}{FAULTS}", "ET_JAX_SHARED": str(ROOT.parent / "shared")}
    how = {"cwd": tree, "env": os.environ | paths, "capture_output": True, "text": True, "timeout": SECONDS}
    try:
        done = subprocess.run([*command, *tests, *arguments], **how)
    except subprocess.TimeoutExpired as error:
        raise NoResult(f"no result in {SECONDS} s") from error
    if done.returncode in (0, 5):  # 5: no test is chosen
        return None
    ended = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not ended:
        raise NoResult(f"no result, for pytest itself ended with {done.returncode}")
    return ended[0]


def run(args: argparse.Namespace, arguments: list[str]) -> None:
    """Try every fault that has no result of this name yet; print and record each result as it comes."""
    entered, seconds = read_map(args.map)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = kept.setdefault(args.name, [])
    tried = {(row["file"], row["what"]) for row in rows}
    chosen = [one for one in faults() if args.only in one["file"] and (one["file"], one["what"]) not in tried]

    def one(fault: dict[str, str]) -> dict[str, Any] | None:
        quick, files = tests_of(fault, entered, seconds)
        try:
            with tempfile.TemporaryDirectory() as folder:
                seen = seen_by(fault, Path(folder), quick, arguments) if quick else None
                seen = seen or (seen_by(fault, Path(folder), files, arguments) if files else None)
        except NoResult as reason:
            print(f"{fault['file']}: {fault['what']}: {reason}", flush=True)
            return None
        print(f"{fault['file']}: {fault['what']}: {seen or 'NOT SEEN'}", flush=True)
        return {"file": fault["file"], "what": fault["what"], "seen_by": seen, "files_tried": len(files)}

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as workers:
        for done in concurrent.futures.as_completed([workers.submit(one, fault) for fault in chosen]):
            if (row := done.result()) is None:
                continue
            rows.append(row)
            RESULTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(row['seen_by'] is not None for row in rows)} of {len(rows)} faults seen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run"])
    parser.add_argument("--only", default="", help="faults in files with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at a time (default: 2)")
    parser.add_argument("--name", default="short", help="the name of the results (default: short)")
    parser.add_argument("--map", type=Path, default=ROOT / "runs/entered", help="where the map is kept")
    args, arguments = parser.parse_known_args()
    make_map(args.map, arguments) if args.what == "map" else run(args, arguments)


if __name__ == "__main__":
    main()

"""Which tests see a fault: put those of tests/faults/faults.toml into a copy of the code, one at a time.

    python scripts/plant_faults.py map [PYTEST ARGUMENTS]     # which functions each test file enters, by running them
    python scripts/plant_faults.py run [--only FOLDER] [--jobs 2] [PYTEST ARGUMENTS]
    python scripts/plant_faults.py run --name slow --unseen-by short --map runs/entered_slow -m slow

`run` gives every fault to the test files that enter the function it is in, first those named for its module, then the
quickest, until a test fails; what runs in a process of its own enters nothing, so commands come last, and are asked
about the outer folders alone. PYTEST ARGUMENTS choose the tests of either, such as `-m slow`. Results are added to
benchmarks/results/faults.json by the name of the run (`--name`); a fault that has one there is not tried again.
"""

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests/faults/faults.toml"
RESULTS = ROOT / "benchmarks/results/faults.json"
COMMANDS = "tests/commands"  # what they run is in processes of their own
LAWS = "tests/laws"
INNER = ("control", "decode", "models")  # commands are not asked about these: they would take minutes, and see little
SECONDS = 1200  # for all tests of one fault


def faults() -> list[dict[str, str]]:
    """Return every fault of the list. Raises SystemExit where one does not stand once in its file any more."""
    found = tomllib.loads(FAULTS.read_text(encoding="utf-8"))["fault"]
    for fault in found:
        count = (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"])
        if count != 1:
            sys.exit(f"{fault['file']} holds {fault['old']!r} {count} times; write the fault anew in {FAULTS}.")
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
    """Run the tests with a plugin that notes what each file enters, and keep that in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    beside = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/faults'}", "ENTERED": str(folder)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "entered", *arguments]
    subprocess.run(command, cwd=ROOT, env=os.environ | beside)


def read_map(folder: Path) -> tuple[dict[tuple[str, str], set[str]], dict[str, float]]:
    """Return the test files that enter each function, (file, name), and the seconds of each test file."""
    entered: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    seconds: dict[str, float] = collections.defaultdict(float)
    for part in folder.glob("*.jsonl"):
        for line in part.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            seconds[row["test"]] += row["seconds"]
            for file, name in row["entered"]:
                entered[file, name].add(row["test"])
    return entered, seconds


def tests_of(fault: dict[str, str], entered: dict, seconds: dict[str, float]) -> list[str]:
    """Return the test files that could see a fault: those named for its module, then the quickest, commands last."""
    name, module = function_of(fault), Path(fault["file"]).stem
    found = {
        test
        for (file, function), tests in entered.items()
        if file == fault["file"] and (name is None or function == name or function.startswith(f"{name}."))
        for test in tests
    }
    if any(test.startswith(LAWS) for test in found):  # the first law of a model traces it for all
        found |= {test for test in seconds if test.startswith(LAWS)}
    commands = {test for test in seconds if test.startswith(COMMANDS)}
    found = found - commands if Path(fault["file"]).parent.name in INNER else found | commands
    return sorted(found, key=lambda test: (test.startswith(COMMANDS), module not in Path(test).stem, seconds[test]))


def seen_by(fault: dict[str, str], tree: Path, tests: list[str], arguments: list[str]) -> str | None:
    """Return the first test that fails, or never ends, with a fault in the copy `tree`; None where none does."""
    place, source = tree / fault["file"], (ROOT / fault["file"]).read_text(encoding="utf-8")
    place.write_text(source.replace(fault["old"], fault["new"]), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-v", "-x", "--no-header", "--tb=no", "--timeout=200"]
    try:
        done = subprocess.run(
            [*command, *tests, *arguments],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "ET_JAX_SHARED": str(ROOT.parent / "shared")},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    finally:
        place.write_text(source, encoding="utf-8")
    if done.returncode in (0, 5):  # 5: no test is chosen
        return None
    begun = [line.split(" ")[0] for line in done.stdout.splitlines() if line.startswith("tests/")]
    ended = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return ended[0] if ended else f"{begun[-1] if begun else 'pytest itself'} (ends with {done.returncode})"


def run(args: argparse.Namespace, arguments: list[str]) -> None:
    """Try every fault that has no result of this name yet, print who saw it, and keep each result as it comes."""
    entered, seconds = read_map(args.map)
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    rows = kept.setdefault(args.name, [])
    tried = {(row["file"], row["what"]) for row in rows}
    chosen = [one for one in faults() if (one["file"], one["what"]) not in tried and args.only in one["file"]]
    if args.unseen_by:
        if args.unseen_by not in kept:
            sys.exit(f"{RESULTS} has no run named {args.unseen_by!r}; it has {', '.join(kept)}.")
        unseen = {(row["file"], row["what"]) for row in kept[args.unseen_by] if row["seen_by"] is None}
        chosen = [one for one in chosen if (one["file"], one["what"]) in unseen]
    trees: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.jobs):
            tree = Path(folder) / f"copy{number}"
            ignored = shutil.ignore_patterns(".venv*", ".git", "site", "runs", "benchmarks/results")
            shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
            trees.put(tree)

        def one(fault: dict[str, str]) -> dict[str, Any]:
            tree, begun = trees.get(), time.monotonic()
            tests = tests_of(fault, entered, seconds)
            try:
                seen = seen_by(fault, tree, tests, arguments)
            finally:
                trees.put(tree)
            took = time.monotonic() - begun
            print(f"{fault['file']}: {fault['what']}: {seen or 'NOT SEEN'} ({took:.0f} s)", flush=True)
            return {"file": fault["file"], "what": fault["what"], "seen_by": seen, "files_tried": len(tests)}

        with concurrent.futures.ThreadPoolExecutor(args.jobs) as workers:
            for done in concurrent.futures.as_completed([workers.submit(one, fault) for fault in chosen]):
                rows.append(done.result())
                RESULTS.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    print(f"{sum(row['seen_by'] is not None for row in rows)} of {len(rows)} faults seen")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["map", "run"])
    parser.add_argument("--only", default="", help="faults in files with this in their name")
    parser.add_argument("--unseen-by", help="faults that the run of this name did not see")
    parser.add_argument("--jobs", type=int, default=2, help="faults tried at a time (default: 2)")
    parser.add_argument("--name", default="short", help="what the results are called (default: short)")
    parser.add_argument("--map", type=Path, default=ROOT / "runs/entered", help="where the map is kept")
    args, arguments = parser.parse_known_args()
    if args.what == "map":
        make_map(args.map, arguments)
    else:
        run(args, arguments)


if __name__ == "__main__":
    main()

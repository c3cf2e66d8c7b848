"""Run hostile values against everything that comes from strangers: no traceback, hang, memory or harm to neighbours.

    python -m scripts.fuzz [--cases 5000] [--seed 0] [--target config] [--output FILE.json]
    python -m scripts.fuzz --only templates:17

Targets: config.json, the weights' index and headers, tokenizer files, chat templates, batch lines (through the command,
each file twice), calls of the Python API, snapshots. A case depends on its seed, target and number alone. A worker
process runs it, and is killed past 10 seconds or 2 GB. `--work` records finished cases by the digest of the code; the
same command continues after them. `--only` runs one case in this process and prints it.

A case is accepted, refused (with one sentence, or an error row for its line), or a failure. The exit code is 1 where
there are failures.
"""

import argparse
import collections
import hashlib
import importlib
import json
import pprint
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.fuzzing import TARGETS
from scripts.fuzzing.watch import FAILURES, draw, run_cases, verdict
from scripts.measuring import arguments
from scripts.measuring.results import REPOSITORY, table, write

_LIBRARIES = ("et_jax", "tokenizers", "sentencepiece", "safetensors", "orbax-checkpoint", "jinja2")


def digest() -> str:
    """Return a digest of the package and of the targets, to which verdicts belong."""
    files = sorted(file for name in ("et_jax", "scripts/fuzzing") for file in (REPOSITORY / name).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def run(name: str, module: str, seed: int, count: int, path: Path) -> list[dict[str, Any]]:
    """Run those of the first `count` cases of a target that the file lacks, and return the rows of all."""
    recorded = path.read_bytes() if path.exists() else b""
    recorded = recorded[: recorded.rfind(b"\n") + 1]  # a kill may have torn the last row
    path.write_bytes(recorded)
    rows = {row["number"]: row for row in map(json.loads, recorded.splitlines()) if row["number"] < count}
    print(f"{name}: {len(rows)} of {count} done", file=sys.stderr)
    with path.open("a", encoding="utf-8") as file:
        for row in run_cases(module, seed, [number for number in range(count) if number not in rows]):
            rows[row["number"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
            if row["outcome"] in FAILURES:
                print(f"{name}:{row['number']}: {row['outcome']}: {row['detail']}", file=sys.stderr, flush=True)
    return [{"target": name} | row for row in rows.values()]


def one(name: str, number: int, seed: int) -> int:
    """Run one case here, without limits, and print it with its outcome."""
    target = importlib.import_module(TARGETS[name])
    case = draw(target, seed, number)
    pprint.pprint(case, width=120)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        outcome, detail = verdict(target.prepare(Path(folder)), case)
    print(f"{outcome}: {detail}")
    return 1 if outcome in FAILURES else 0


def _case(text: str) -> tuple[str, int]:
    name, _, number = text.partition(":")
    if name not in TARGETS or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no case; name one such as templates:17")
    return name, int(number)


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("--cases", type=arguments.count(), default=5000, help="in all, shared by the targets (5000)")
    parser.add_argument("--seed", type=arguments.count(0), default=0)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="repeatable (default all)")
    parser.add_argument("--work", type=Path, default=Path("runs/fuzz"), help="folder of finished cases (runs/fuzz)")
    parser.add_argument("--output", type=arguments.output, help="write the figures here")
    parser.add_argument("--only", metavar="TARGET:NUMBER", type=_case, help="run one case in the foreground")
    args = parser.parse_args()
    if args.only is not None:
        return one(*args.only, args.seed)
    names, code, rows = args.target or list(TARGETS), digest(), []
    args.work.mkdir(parents=True, exist_ok=True)
    for place, name in enumerate(names):
        count = args.cases // len(names) + (place < args.cases % len(names))
        rows += run(name, TARGETS[name], args.seed, count, args.work / f"{name}-{args.seed}-{code}.jsonl")
    counts = {name: collections.Counter(row["outcome"] for row in rows if row["target"] == name) for name in names}
    kinds = ["accepted", "refused", *(kind for kind in FAILURES if any(kind in each for each in counts.values()))]
    print(table(["target", *kinds], [[name, *(each[kind] for kind in kinds)] for name, each in counts.items()]))
    failures = [row for row in rows if row["outcome"] in FAILURES]
    if args.output is not None:
        settings = {"cases": args.cases, "seed": args.seed, "targets": names, "code": code}
        settings |= {"versions": {name: version(name) for name in _LIBRARIES}}
        seconds = round(sum(row["seconds"] for row in rows), 1)
        write(args.output, "scripts/fuzz.py", settings, seconds=seconds, targets=counts, failures=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

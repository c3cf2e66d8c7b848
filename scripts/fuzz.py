"""Run hostile values against everything that comes from strangers: no traceback, hang, memory or harm to neighbours.

    python -m scripts.fuzz [--cases 5000] [--seed 0] [--target config] [--output FILE.json]
    python -m scripts.fuzz --target templates --only 17

Targets: config.json, the weights' index and headers, tokenizer files, chat templates, batch lines (through the command,
each file twice), calls of the Python API, snapshots. A case depends on its seed, target and number alone. A worker
process runs it, and is killed past 10 seconds or 2 GB. `--only` runs one case in the foreground and prints it.

A case is accepted, refused (with one sentence, or an error row for its line), or a failure. The exit code is 1 where
there are failures.
"""

import collections
import importlib
import pprint
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scripts.fuzzing import TARGETS
from scripts.fuzzing.watch import FAILURES, draw, run_cases, verdict
from scripts.measuring import arguments
from scripts.measuring.results import table, write

_LIBRARIES = ("et_jax", "tokenizers", "sentencepiece", "safetensors", "orbax-checkpoint", "jinja2")


def run(name: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Run the first `count` cases of a target, print its failures as they come, and return the rows of all."""
    rows = []
    for row in run_cases(TARGETS[name], seed, range(count)):
        rows.append({"target": name} | row)
        if row["outcome"] in FAILURES:
            print(f"{name}:{row['number']}: {row['outcome']}: {row['detail']}", file=sys.stderr, flush=True)
    print(f"{name}: {count} done", file=sys.stderr, flush=True)
    return rows


def one(name: str, number: int, seed: int) -> int:
    """Run one case here, without limits, and print it with its outcome."""
    target = importlib.import_module(TARGETS[name])
    case = draw(target, seed, number)
    pprint.pprint(case, width=120)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        outcome, detail = verdict(target.prepare(Path(folder)), case)
    print(f"{outcome}: {detail}")
    return 1 if outcome in FAILURES else 0


def main() -> int:
    parser = arguments.parser(__doc__)
    parser.add_argument("--cases", type=arguments.count(), default=5000, help="in all, shared by the targets (5000)")
    parser.add_argument("--seed", type=arguments.count(0), default=0)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="repeatable (default all)")
    parser.add_argument("--output", type=arguments.output, help="write the figures here")
    parser.add_argument("--only", metavar="NUMBER", type=arguments.count(0), help="one case, in the foreground")
    args = parser.parse_args()
    names, rows = args.target or list(TARGETS), []
    if args.only is not None:
        return max(one(name, args.only, args.seed) for name in names)
    for place, name in enumerate(names):
        rows += run(name, args.seed, args.cases // len(names) + (place < args.cases % len(names)))
    counts = {name: collections.Counter(row["outcome"] for row in rows if row["target"] == name) for name in names}
    kinds = ["accepted", "refused", *(kind for kind in FAILURES if any(kind in each for each in counts.values()))]
    print(table(["target", *kinds], [[name, *(each[kind] for kind in kinds)] for name, each in counts.items()]))
    failures = [row for row in rows if row["outcome"] in FAILURES]
    if args.output is not None:
        settings = {"cases": args.cases, "seed": args.seed, "targets": names}
        settings |= {"versions": {name: version(name) for name in _LIBRARIES}}
        seconds = round(sum(row["seconds"] for row in rows), 1)
        write(args.output, "scripts/fuzz.py", settings, seconds=seconds, targets=counts, failures=failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

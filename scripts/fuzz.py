"""Hostile values for everything that comes from strangers: no traceback, no hang, no memory, no neighbour harmed.

    python scripts/fuzz.py [--cases 5000] [--seed 0] [--surface config] [--output FILE.json]
    python scripts/fuzz.py --only templates:17

Surfaces: config.json, the weights' index and headers, tokenizer files, chat templates, batch lines (through
the command, each file twice), calls of the Python API, snapshots. Hypothesis draws the cases; a case
follows from its seed, surface and number alone. Each runs in a worker process that is watched: past 10
seconds or 2 GB it is killed, and started anew. Cases that are done are kept in --work, and the same command
goes on after the last of them. `--only` runs one case here and prints it.

A case is accepted (it worked), refused (one sentence, or the error row of its line), or a failure. The exit
code is 1 where there are failures.
"""

import argparse
import collections
import importlib
import pprint
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fuzzing import SURFACES
from fuzzing.cases import FAILURES, draw
from fuzzing.judge import judge
from fuzzing.watch import Campaign, Done, code_digest, run_cases

from scripts.measuring import arguments
from scripts.measuring.results import table, write

_LIBRARIES = ("et_jax", "hypothesis", "tokenizers", "sentencepiece", "safetensors", "orbax-checkpoint", "jinja2")


def shares(total: int, names: list[str]) -> dict[str, int]:
    """Return how many of the cases each surface has."""
    return {name: total // len(names) + (place < total % len(names)) for place, name in enumerate(names)}


def outcomes(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how many cases of each surface had which outcome."""
    counts: dict[str, collections.Counter[str]] = {}
    for row in rows:
        counts.setdefault(row["surface"], collections.Counter())[row["outcome"]] += 1
    return {name: dict(counted) for name, counted in counts.items()}


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if args.only is not None:
        return _one(args.only, args.seed)
    names = args.surface or list(SURFACES)
    try:
        done = Done(args.work / "cases.jsonl", Campaign(seed=args.seed, code=code_digest()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        rows = _run(args, names, done)
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    return _report(args, names, rows)


def _run(args: argparse.Namespace, names: list[str], done: Done) -> list[dict[str, Any]]:
    """Run what is not done yet, and return the rows of all."""
    rows = []
    for name, count in shares(args.cases, names).items():
        left = [number for number in range(count) if (name, number) not in done.rows]
        print(f"{name}: {count - len(left)} of {count} done", file=sys.stderr)
        for row in run_cases(SURFACES[name], name, args.seed, left, tell=_tell):
            done.add(row)
            if row["outcome"] in FAILURES:
                _tell(f"{name}:{row['number']}: {row['outcome']}: {row['detail']}")
        rows += [done.rows[name, number] for number in range(count)]
    return rows


def _report(args: argparse.Namespace, names: list[str], rows: list[dict[str, Any]]) -> int:
    """Print the outcomes, write the figures where they are wanted, and return the exit code."""
    counts = outcomes(rows)
    failures = [row for row in rows if row["outcome"] in FAILURES]
    kinds = ["accepted", "refused", *(kind for kind in FAILURES if any(kind in counted for counted in counts.values()))]
    lines = [[name, *(counted.get(kind, 0) for kind in kinds)] for name, counted in counts.items()]
    print(table(["surface", *kinds], lines))
    if args.output is not None:
        settings = {"cases": args.cases, "seed": args.seed, "surfaces": names, "code": code_digest()}
        seconds = round(sum(row["seconds"] for row in rows), 1)
        write(
            args.output,
            "scripts/fuzz.py",
            settings | {"versions": {name: version(name) for name in _LIBRARIES}},
            seconds=seconds,
            surfaces=counts,
            failures=failures,
        )
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=arguments.count(), default=5000, help="in all, shared by the surfaces (default 5000)"
    )
    parser.add_argument("--seed", type=arguments.count(0), default=0)
    parser.add_argument("--surface", action="append", choices=list(SURFACES), help="only this one; repeatable")
    parser.add_argument("--work", type=Path, default=Path("runs/fuzz"), help="where done cases are kept (runs/fuzz)")
    parser.add_argument("--output", type=arguments.output, help="write the figures here")
    parser.add_argument("--only", metavar="SURFACE:NUMBER", type=_case, help="run one case in the foreground")
    return parser


def _case(text: str) -> tuple[str, int]:
    name, _, number = text.partition(":")
    if name not in SURFACES or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no case; name one such as templates:17")
    return name, int(number)


def _one(case: tuple[str, int], seed: int) -> int:
    """Run one case here, unwatched, and print it with its verdict."""
    name, number = case
    surface = importlib.import_module(SURFACES[name]).SURFACE
    drawn = draw(surface, seed, name, number)
    pprint.pprint(drawn, width=120)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        verdict = judge(surface.prepare(Path(folder)), drawn)
    print(f"{verdict.outcome}: {verdict.detail}")
    return 1 if verdict.outcome in FAILURES else 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

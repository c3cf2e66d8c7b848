"""Run an experiment, list them, or write their tables into the documents.

    python -m scripts.measure --list
    python -m scripts.measure selection --text novels.tar.xz
    python -m scripts.measure selection --help
    python -m scripts.measure --tables

What an experiment found goes to benchmarks/results/experiments/NAME.json, or to `--output`. Arms that are there with
the same commit, settings, weights and text are not measured again. With `--quick` it takes seconds, and keeps nothing
unless there is an `--output`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from et_jax.errors import UsageError
from scripts.measuring import tables
from scripts.measuring.experiment import add_flags, load_experiment, names, settings_of
from scripts.measuring.results import REPOSITORY
from scripts.measuring.runner import run, runs_of

RESULTS = REPOSITORY / "benchmarks/results/experiments"


def measure(name: str, arguments: Sequence[str]) -> None:
    """Run an experiment by name with its flags, and print its table."""
    experiment = load_experiment(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m scripts.measure {name}", description=experiment.question, allow_abbrev=False
    )
    add_flags(parser, experiment.settings)
    parser.add_argument("--quick", action="store_true", help="in seconds: too small to learn from")
    parser.add_argument("--output", type=Path, help="the JSON file (default benchmarks/results/experiments)")
    given = vars(parser.parse_args(arguments))
    quick, output = given.pop("quick"), given.pop("output")
    settings = settings_of(experiment, given, quick)
    path = output or (None if quick else RESULTS / f"{name}.json")
    found = run(name, experiment, settings, path, lambda line: print(line, file=sys.stderr, flush=True))
    print(tables.part(name, experiment, [found]))


def write_tables() -> None:
    """Write the table of every experiment that has results."""
    for name in names():
        experiment, path = load_experiment(name), RESULTS / f"{name}.json"
        if runs := runs_of(path):
            tables.insert(tables.DOCUMENT, name, tables.illustrated(name, experiment, runs))
            for one in runs:
                if place := tables.picture(name, experiment, one):
                    tables.draw(experiment, one, tables.DOCS / place)
            print(f"{name}: {tables.DOCUMENT}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print every experiment with its question")
    parser.add_argument("--tables", action="store_true", help="write the tables of the documents")
    parser.add_argument("name", nargs="?", help="an experiment, with its flags after it; NAME --help prints them")
    try:
        if words and not words[0].startswith("-"):
            measure(words[0], words[1:])
            return 0
        args = parser.parse_args(words)
        if args.list:
            for name in names():
                print(f"{name:16} {load_experiment(name).question}")
        elif args.tables:
            write_tables()
        else:
            parser.print_help()
    except UsageError as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

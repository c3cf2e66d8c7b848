"""What it takes from the shell to the first token: a start with nothing kept, and one with all programs kept.

Every start is a process of its own, `python -m et_jax.generate`, of random weights in the shape of SmolLM-135M, and of
the bundled model. A cold start has an empty folder of programs, a warm one that which the cold one left; the package's
bytecode is there in both. Wall time counts what passed until the first token was printed, processor time what all
threads of the process did, which ends with that token; what tracing, compiling and loading took is what the command
says. With `--before FOLDER`, a checkout of another version starts by turns with this one.
"""

import argparse
import compileall
import dataclasses
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from scripts.measuring import arguments
from scripts.measuring.random_folder import random_folder
from scripts.measuring.results import REPOSITORY, RESULTS, table, write
from scripts.measuring.shapes import SMOLLM_135M

CASES = {
    "off": ["--control", "off"],
    "certified": ["--control", "certified"],  # which never chooses blocks on a CPU
    "certified, choosing": ["--control", "certified", "--min-context", "1"],
    "lookup": ["--control", "off", "--draft", "lookup"],
    "certified, lookup": ["--control", "certified", "--draft", "lookup"],
}
READY = re.compile(r"(\d+) programs ready: ([\d.]+) s tracing, ([\d.]+) s compiling, ([\d.]+) s loading")


def started(checkout: Path, model: str, case: list[str], kept: Path, rows: int) -> dict[str, Any]:
    """Return what a start took. Raises UsageError where the command fails."""
    command = [sys.executable, "-m", "et_jax.generate", "--model", model, "--max-num-seqs", str(rows)]
    command += ["--prompt", "It was", "--max-tokens", "1", "--temperature", "0", *case]
    environment = os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(kept)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile("w+") as told:
        with subprocess.Popen(command, env=environment, cwd=kept, stdout=subprocess.PIPE, stderr=told) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            wall = time.perf_counter() - began
            process.stdout.read()
        told.seek(0)
        said = told.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise UsageError(f"{' '.join(command)} ended with {process.returncode}: {said[-500:]}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ready = READY.search(said)  # a version that does not say it leaves these unknown
    spent = (None,) * 3 if ready is None else tuple(float(second) for second in ready.groups()[1:])
    return {"wall": wall, "processor": processor} | dict(zip(("tracing", "compiling", "loading"), spent, strict=True))


def measured(args: argparse.Namespace, models: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for every model, case and version: a cold start, then a warm one."""
    versions = {"now": REPOSITORY} | ({} if args.before is None else {"before": args.before.resolve()})
    for checkout in versions.values():
        compileall.compile_dir(checkout / "et_jax", quiet=1)
    rows = []
    for name, model in models.items():
        for case in args.case:
            for version, checkout in versions.items():
                with tempfile.TemporaryDirectory() as kept:
                    for start in ("cold", "warm"):
                        took = started(checkout, model, CASES[case], Path(kept), args.rows)
                        rows.append({"model": name, "case": case, "version": version, "start": start} | took)
                        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print a table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layers",
        type=arguments.count(0),
        default=30,
        help="of the shape of SmolLM-135M (default 30; 0: bundled alone)",
    )
    parser.add_argument("--rows", type=arguments.count(2), default=16, help="sequences served at once (default 16)")
    parser.add_argument("--case", nargs="+", choices=CASES, default=[*CASES], help="what is started (default all)")
    parser.add_argument("--before", type=arguments.checkout, help="a checkout of another version, beside this one")
    parser.add_argument("--output", type=arguments.output, default=RESULTS / "starts.json", help="a JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(SMOLLM_135M, num_layers=args.layers, windows=(None,) * args.layers)
        shape = f"{args.layers} layers of the 135M shape"
        models = {"bundled": "bundled"}
        if args.layers:
            models[shape] = str(random_folder(Path(folder), config, "bfloat16"))
        rows = measured(args, models)
    write(args.output, "scripts/measure_starts.py", {"layers": args.layers, "rows": args.rows}, starts=rows)
    header = ["model", "case", "version", "start", "wall", "processor", "tracing", "compiling", "loading"]
    print(table(header, [[row[name] for name in header] for row in rows]))


if __name__ == "__main__":
    main()

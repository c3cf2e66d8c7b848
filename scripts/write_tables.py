"""Write the tables of the documents anew from benchmarks/results, measuring first if asked to.

    python scripts/write_tables.py [--measure --trace TRACE --case MODEL TEXT --case MODEL TEXT ...]

Between the two lines `<!-- NAME: begin -->` and `<!-- NAME: end -->` a document belongs to this script. With
`--measure` every measuring script runs on the given models and texts (see `measure_bounds.py`) and on the recorded
arrivals of TRACE (see `measure_scheduling.py`), and draws its pictures; what they cost is timed, so nothing else should
run.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_overhead
import bench_selection
import bench_throughput
import measure_bounds
import measure_estimators
import measure_scheduling
import measure_selection
import measure_temperature
import roofline
from report import RESULTS

DOCS = Path(__file__).resolve().parents[1] / "docs"
TARGET = 2.0  # nats: of the temperature tables shown; the results hold the others


def estimators(results: dict[str, Any]) -> str:
    """Return the tables of how estimators agree with the exact entropy."""
    cases = results["cases"]
    return "\n\n".join(f"{measure_estimators.title(c)}:\n\n{measure_estimators.estimator_table(c)}" for c in cases)


def bounds(results: dict[str, Any]) -> str:
    """Return the tables of how much each bound opens, and of the residual."""
    parts = [
        f"{measure_bounds.title(case)}:\n\n{measure_bounds.bounds_table(case)}\n\n{measure_bounds.residual_table(case)}"
        for case in results["cases"]
    ]
    return "\n\n".join(parts)


def temperature(results: dict[str, Any]) -> str:
    """Return the table of every law at the target shown, for each model."""
    parts = []
    for model in results["models"]:
        [result] = [result for result in model["targets"] if result["target"] == TARGET]
        parts.append(f"{model['model']}, target {TARGET:g} nats:\n\n{measure_temperature.law_table(result)}")
    return "\n\n".join(parts)


def selectors(results: dict[str, Any]) -> str:
    """Return the tables of quality by selector."""
    cases = results["cases"]
    return "\n\n".join(f"{measure_selection.title(c)}:\n\n{measure_selection.selector_table(c)}" for c in cases)


def tolerances(results: dict[str, Any]) -> str:
    """Return the tables of quality by what sets the tolerance."""
    return "\n\n".join(f"{c['model']}:\n\n{measure_selection.tolerance_table(c)}" for c in results["cases"])


def overhead(results: dict[str, Any]) -> str:
    """Return what the estimator and the laws cost of a step."""
    large = results["llama_3_8b"]
    flops, moved = large["estimator_flops"] / large["token_flops"], large["estimator_bytes"] / large["weight_bytes"]
    large_model = f"{flops:.3%} of a token's FLOPs and {moved:.3%} of the weights' bytes"
    return (
        f"{bench_overhead.overhead_table(results['rows'])}\n\n"
        f"On the shape of Llama-3-8B, with 128,256 tokens, one pass is {large_model}."
    )


def selection_cost(results: dict[str, Any]) -> str:
    """Return what choosing blocks costs and saves."""
    return bench_selection.selection_table(results["cases"])


def throughput(results: dict[str, Any]) -> str:
    """Return how fast many requests are served at once, beside one at a time."""
    return bench_throughput.throughput_table(results["rows"])


def scheduling(results: dict[str, Any]) -> str:
    """Return the tables of priority rules under overload."""
    return "\n\n".join(
        f"{case['load']:g} times the tokens that fit:\n\n{measure_scheduling.scheduling_table(case['rows'])}"
        for case in results["cases"]
    )


CONTROL: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "estimators": ("estimators.json", estimators),
    "overhead": ("overhead.json", overhead),
    "selection_cost": ("selection_cost.json", selection_cost),
    "bounds": ("bounds.json", bounds),
    "temperature": ("temperature.json", temperature),
    "selectors": ("selection.json", selectors),
    "tolerances": ("selection.json", tolerances),
}
SERVING: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "throughput": ("throughput.json", throughput),
    "scheduling": ("scheduling.json", scheduling),
}


def origin(results: dict[str, Any]) -> str:
    """Return the line that says where figures come from."""
    machine = results["machine"]
    settings = ", ".join(f"{name} {value}" for name, value in results["settings"].items())
    return (
        f"`{results['script']}` on {machine['processor']}, {machine['cores']} cores, jax {machine['jax']} ({settings})."
    )


def insert(document: Path, name: str, text: str) -> None:
    """Replace the part of the document that is called `name`."""
    found = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    before = document.read_text(encoding="utf-8")
    if not found.search(before):
        raise ValueError(f"{document} has no part between <!-- {name}: begin --> and <!-- {name}: end -->")
    document.write_text(found.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", before), encoding="utf-8")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure anew before writing")
    parser.add_argument("--case", nargs=2, action="append", default=[], metavar=("MODEL", "TEXT"))
    parser.add_argument("--trace", help="recorded arrivals")
    args = parser.parse_args()
    if args.measure != bool(args.case) or args.measure != bool(args.trace):
        parser.error(
            "--measure, --trace and --case go together: arrivals, and the models to measure, each with its text"
        )
    if args.measure:
        cases = [word for case in args.case for word in ("--case", *case)]
        # the scripts that can refuse a model or a text come first
        for script, *more in (
            ("measure_estimators", *cases),
            ("measure_bounds", *cases),
            ("measure_temperature", *cases, "--plot"),
            ("measure_selection", *cases),
            ("measure_scheduling", "--trace", args.trace),
            ("bench_throughput",),
            ("bench_overhead",),
            ("bench_selection",),
        ):
            path = Path(__file__).with_name(f"{script}.py")
            if failed := subprocess.run([sys.executable, str(path), *more]).returncode:
                return failed
    for document, parts in (("control.md", CONTROL), ("serving.md", SERVING)):
        for name, (file, tables) in parts.items():
            results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
            insert(DOCS / document, name, f"{origin(results)}\n\n{tables(results)}")
    insert(DOCS / "kernels.md", "roofline", roofline.floors())
    print(f"wrote {len(CONTROL) + len(SERVING) + 1} parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())

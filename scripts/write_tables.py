"""Write the tables of the documents anew from benchmarks/results, measuring first if asked to.

    python scripts/write_tables.py [--measure --trace TRACE ... --case MODEL TEXT --case MODEL TEXT ...]

Between the two lines `<!-- NAME: begin -->` and `<!-- NAME: end -->` a document belongs to this script. With
`--measure` every measuring script runs on the given models and texts (see `measure_bounds.py`) and on the recorded
arrivals of the traces (see `measure_scheduling.py`, where the first model is one that ends its texts itself), and draws
its pictures; what they cost is timed, so nothing else should run.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from et_jax.evidence import draft_tables, expert_tables, prompt_tables, serving_tables, tables
from et_jax.evidence.roofline import roofline, self_drafting
from et_jax.io.files import replace_file
from scripts.measuring.results import REPOSITORY, RESULTS

DOCS = REPOSITORY / "docs"
TARGET = 2.0  # nats: of the temperature tables shown; the results hold the others
COST = "0.1"  # of a drafter's step, over the model's: of the time saved by stops, likewise


# By part of the document: the file of results, and the table made of it.
CONTROL: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "estimators": ("estimators.json", lambda found: tables.estimators(found["cases"])),
    "overhead": ("overhead.json", lambda found: serving_tables.overhead(found["rows"], found["llama_3_8b"])),
    "sampling": ("sampling.json", lambda found: serving_tables.sampling(found["cases"], found["steps"])),
    "selection_cost": ("selection_cost.json", lambda found: tables.selection_cost(found["cases"])),
    "bounds": ("bounds.json", lambda found: tables.bounds(found["cases"])),
    "temperature": ("temperature.json", lambda found: tables.temperature(found["models"], TARGET)),
    "selectors": ("selection.json", lambda found: tables.selectors(found["cases"])),
    "tolerances": ("selection.json", lambda found: tables.tolerances(found["cases"])),
    "attention_entropy": ("attention_entropy.json", lambda found: tables.arms(found["cases"])),
    "free_running": ("free_running.json", lambda found: tables.free_running(found["tasks"])),
    "pruning": ("pruning.json", lambda found: tables.pruning(found["cases"])),
    "codes": ("codes.json", lambda found: tables.codes(found["lines"])),
    "pruning_cost": ("pruning_cost.json", lambda found: tables.pruning_cost(found["cases"])),
    "steps": ("steps.json", lambda found: tables.steps(found["cases"])),
}
SERVING: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "throughput": ("throughput.json", lambda found: serving_tables.throughput(found["rows"])),
    "scheduling": ("scheduling.json", lambda found: serving_tables.scheduling(found["cases"])),
    "starts": ("starts.json", lambda found: serving_tables.starts(found["starts"])),
    "versions": ("versions.json", lambda found: serving_tables.versions(found["versions"])),
    "few_rows": ("few_rows.json", lambda found: serving_tables.versions(found["versions"])),
    "long_texts": ("long_texts.json", lambda found: serving_tables.versions(found["versions"])),
    "peers": ("peers.json", lambda found: serving_tables.peers(found["cases"], found["agreement"])),
}
DRAFTING: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "acceptance": ("acceptance.json", lambda found: draft_tables.acceptance(found["acceptance"])),
    "drafting": ("drafting.json", lambda found: draft_tables.drafting(found["prompted"])),
    "drafting_forced": ("drafting_forced.json", lambda found: draft_tables.drafting_forced(found["forced"])),
    "draft_lengths": ("acceptance.json", lambda found: draft_tables.draft_lengths(found["drafts"], COST)),
    "self_drafting": ("self_drafting.json", lambda found: draft_tables.self_drafting(found["cases"])),
    "self_steps": ("self_drafting.json", lambda found: draft_tables.self_steps(found["steps"])),
    "self_drafting_h200": ("self_drafting-h200.json", lambda found: draft_tables.self_drafting(found["cases"])),
    "self_steps_h200": ("self_drafting-h200.json", lambda found: draft_tables.self_steps(found["steps"])),
    "self_drafting_free": ("self_drafting.json", lambda found: draft_tables.self_drafting_free(found["free"])),
    "self_acceptance": ("acceptance.json", lambda found: draft_tables.self_acceptance(found["self"])),
    "self_readers": ("acceptance.json", lambda found: draft_tables.self_readers(found["readers"])),
    "own_lengths": ("acceptance.json", lambda found: draft_tables.own_lengths(found["own_lengths"], COST)),
}
SWITCHING: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "switching": ("switching.json", lambda found: serving_tables.switching(found["lines"], found["questions"])),
}
ENTROPYINFER: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prefill": ("prefill.json", lambda found: prompt_tables.prefill(found["cases"])),
    "prefill_budgets": (
        "prefill_budgets.json",
        lambda found: prompt_tables.prefill_budgets(found["arms"], found["questions"]),
    ),
    "printed_budgets": ("printed_budgets.json", lambda found: prompt_tables.printed_budgets(found["lines"])),
    "asked_amid": ("asked_amid.json", lambda found: prompt_tables.asked_amid(found["lines"])),
    "long_answers": ("long_answers.json", lambda found: prompt_tables.long_answers(found["lines"])),
    "compression": (
        "compression.json",
        lambda found: prompt_tables.compression(
            *(found[part] for part in ("policies", "waits", "questions", "reranked"))
        ),
    ),
    "compression_cost": ("compression_cost.json", lambda found: prompt_tables.compression_cost(found["cases"])),
}
EXPERTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "experts": ("experts.json", lambda found: serving_tables.experts(found["cases"])),
    "expert_rules": ("expert_rules.json", expert_tables.expert_rules),
}
REPORTS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "report": ("report.json", lambda found: serving_tables.rows(found["rows"])),
}
QUANTIZED: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "quantize": ("quantize.json", lambda found: serving_tables.quantized(found["quality"], found["speed"])),
    "four_bits": ("four_bits.json", lambda found: serving_tables.four_bits(found["cases"])),
    "cache": ("cache.json", lambda found: serving_tables.cached(found["quality"], found["speed"])),
}
KERNELS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "kernels_h200": ("kernels-nvidia-h200.json", lambda found: tables.kernels(found["rows"])),
}
SCALE: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {"ray": ("ray.json", serving_tables.ray)}
DOCUMENTS = {
    "measurements.md": CONTROL,
    "serving.md": SERVING,
    "drafting.md": DRAFTING,
    "switching.md": SWITCHING,
    "entropyinfer.md": ENTROPYINFER,
    "reports.md": REPORTS,
    "scale.md": SCALE,
    "kernels.md": KERNELS,
    "quantized.md": QUANTIZED,
    "experts.md": EXPERTS,
}


def origin(results: dict[str, Any]) -> str:
    """Return the line that says where figures come from."""
    machine = results["machine"]
    settings = ", ".join(f"{name} {value}" for name, value in results["settings"].items())
    cpu = f"{machine['processor']}, {machine['cores']} cores"
    where = cpu if machine["device"] == "cpu" else machine["device"]
    return f"`{results['script']}` on {where}, jax {machine['jax']} ({settings})."


def insert(document: Path, name: str, text: str) -> None:
    """Replace the part of the document that is called `name`."""
    found = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    before = document.read_text(encoding="utf-8")
    if not found.search(before):
        raise ValueError(f"{document} has no part between <!-- {name}: begin --> and <!-- {name}: end -->")
    replace_file(document, found.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", before))


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure anew before writing")
    parser.add_argument("--case", nargs=2, action="append", default=[], metavar=("MODEL", "TEXT"))
    parser.add_argument("--trace", nargs="+", default=[], help="recorded arrivals")
    args = parser.parse_args()
    if args.measure != bool(args.case) or args.measure != bool(args.trace):
        parser.error(
            "--measure, --trace and --case go together: arrivals, and the models to measure, each with its text"
        )
    if args.measure:
        cases = [word for case in args.case for word in ("--case", *case)]
        named = [word for _, text in args.case for word in ("--text", Path(text).name, text)]
        # the scripts that can refuse a model or a text come first
        for script, *more in (
            ("measure_estimators", *cases),
            ("measure_bounds", *cases),
            ("measure_temperature", *cases, "--plot"),
            ("measure_selection", *cases),
            ("measure_attention_entropy", *cases),
            ("measure_acceptance", *named),
            ("measure_switching", "--text", args.case[0][1]),
            ("measure_prefill", "--text", args.case[0][1]),
            ("measure_printed_budgets", "--text", args.case[0][1]),
            ("measure_compression", "--text", args.case[0][1]),
            ("measure_asked_amid",),
            ("measure_long_answers",),
            ("measure_free_running",),
            ("measure_pruning",),
            ("measure_codes",),
            ("measure_experts", "--text", args.case[0][1]),
            ("measure_scheduling", "--trace", *args.trace, "--own", *args.case[0]),
            ("bench_throughput",),
            ("measure_starts",),
            ("bench_pruning", args.case[0][1]),
            ("bench_steps", args.case[0][1]),
            ("bench_overhead",),
            ("bench_selection",),
            ("bench_sampling",),
            ("bench_drafting",),
            ("bench_self",),
            ("bench_prefill",),
            ("bench_compression",),
            ("bench_quantize", "--text", args.case[0][1]),
            ("bench_four_bits",),
            ("bench_cache", "--text", args.case[0][1]),
            ("bench_experts",),
            ("bench_report",),
            ("bench_ray",),
        ):
            path = Path(__file__).with_name(f"{script}.py")
            if failed := subprocess.run([sys.executable, str(path), *more]).returncode:
                return failed
    for document, parts in DOCUMENTS.items():
        for name, (file, shown) in parts.items():
            results = json.loads((RESULTS / file).read_text(encoding="utf-8"))
            insert(DOCS / document, name, f"{origin(results)}\n\n{shown(results)}")
    insert(DOCS / "kernels.md", "roofline", roofline())
    insert(DOCS / "drafting.md", "self_modelled", self_drafting())
    print(f"wrote {sum(map(len, DOCUMENTS.values())) + 2} parts")
    return 0


if __name__ == "__main__":
    sys.exit(main())

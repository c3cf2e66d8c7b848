"""The process that touches the chip: measures the cases that its argument names, and answers a line of JSON for each.

    python -m scripts.chip.worker '{"settings": {...}, "cases": [...]}'

Lines are written to the standard output as it was at the start; whatever else is printed goes to the standard error.
The first one has the provenance. After a case that failed the process ends, so that the next one finds the chip's
memory as new.
"""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax

from scripts.chip.cases import Case, Settings
from scripts.measuring.runner import provenance

BY = {"decode": "decoding", "generate": "generating", "torch": "torch_step"}


def spoken(settings: Settings, cases: list[Case]) -> str:
    """Return the argument that names the cases."""
    named = {name: str(one) if isinstance(one, Path) else one for name, one in vars(settings).items()}
    return json.dumps({"settings": named, "cases": [dataclasses.asdict(case) for case in cases]})


def heard(argument: str) -> tuple[Settings, list[Case]]:
    """Return the settings and cases that an argument names."""
    told = json.loads(argument)
    told["settings"]["text"] = Path(told["settings"]["text"])
    return Settings(**told["settings"]), [Case(**one) for one in told["cases"]]


def reason(error: Exception) -> str:
    """Return in a line why a case failed."""
    words = str(error)
    if "RESOURCE_EXHAUSTED" in words or "out of memory" in words.lower():
        return f"out of memory: {words.splitlines()[0][:200]}"
    return f"{type(error).__name__}: {(words.splitlines() or [''])[0][:300]}"


def origin(settings: Settings, engine: str) -> dict[str, Any]:
    """Return where figures come from. Where torch measures, JAX leaves the chip and its libraries alone."""
    if engine != "torch":
        return provenance(settings)
    jax.config.update("jax_platforms", "cpu")
    found, cuda = provenance(settings), importlib.import_module("torch").cuda
    if cuda.is_available():
        found["machine"]["device"] = cuda.get_device_name(0)
    return found


def main() -> int:
    """Measure the cases of the argument and return the exit code."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(**found: Any) -> None:
        print(json.dumps(found), file=answers, flush=True)

    settings, cases = heard(sys.argv[1])
    jax.config.update("jax_disable_most_optimizations", settings.quick)
    # The device's memory is taken as one piece, nearly all of it: pools of pages are large beside what is free.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    say(provenance=origin(settings, cases[0].engine))
    found = importlib.import_module(f"scripts.chip.{BY[cases[0].engine]}").measured(cases, settings)
    for case in cases:
        try:
            one = next(found)
        except Exception as error:  # of what all cases need
            one = error
        if isinstance(one, Exception):
            say(case=case.name, found={"error": reason(one)})
            return 1
        say(case=case.name, found=one)
    return 0


if __name__ == "__main__":
    sys.exit(main())

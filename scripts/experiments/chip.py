"""How long does a decode step take on one NVIDIA GPU, by the share of the blocks it reads?

`decode` runs 16 steps in full depth at Llama-3-8B's shape with random bfloat16 weights, over pages of 64 tokens: every
size under "off", Quest at an eighth of the blocks, and presets at tolerances by which 6 to 10% is read; one size with
the model's own drafts; and one sequence of SmolLM-135M's shape. Beside them stand a plain step of torch in one CUDA
graph, where torch is installed. A round is a call. --profile counts the kernels of a step. The modelled time is by
bytes over 4.2 TB/s and launches times 2.5 us (`python -m scripts.chip.modelled` prints it without a GPU). Experiment
`presets` times the tokens of a real model, with all that surrounds `decode`.

There is a process for each size: weights are drawn once for all its controls, and the pool of the next size finds
memory in one piece. A case that fails, for want of memory or otherwise, is missed; those after it go on in another
process. All takes about four minutes. Started again, a run goes on where it was ended, and tries again what failed.
"""

import importlib.util
import os
from collections.abc import Generator, Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from scripts.chip import processes
from scripts.chip.cases import Case, Settings, cases_of, chosen
from scripts.measuring.experiment import Figure, Group, Missed

# This process only names the chip; its memory is for those that compute there.
os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"


def arms(settings: Settings, cases: list[Case]) -> dict[str, Any]:
    """Return an arm for each case of one process; those after one that failed, or was left out, get another process."""
    running: Generator[dict[str, Any]] | None = None
    upcoming = 0

    def arm(number: int) -> dict[str, Any]:
        nonlocal running, upcoming
        if running is not None and number != upcoming:
            running.close()
            running = None
        running = running or processes.measured(settings, cases[number:])
        found, upcoming = next(running), number + 1
        if "error" in found or upcoming == len(cases):
            running.close()  # whose memory the next one needs
            running = None
        if "error" in found:
            raise Missed(found["error"])
        return found

    return {case.control: partial(arm, number) for number, case in enumerate(cases)}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each size of each engine."""
    cases = chosen(cases_of(settings, importlib.util.find_spec("torch") is not None), settings.cases)
    for (engine, shape, rows, tokens), each in groupby(cases, attrgetter("engine", "shape", "rows", "tokens")):
        labels = {"by": engine, "shape": shape, "sequences x tokens": f"{rows} x {tokens}"}
        yield Group(labels=labels, arms=arms(settings, list(each)), baseline="off", timed=True)


FIGURES = {
    "milliseconds": Figure(header="ms a step", against="ratio"),
    "modelled": Figure(header="ms, modelled"),
    "share_read": Figure(header="blocks read"),
    "tokens_per_step": Figure(header="tokens a step"),
    "kernels": Figure(header="kernels a step"),
}

"""What passes from the shell to the first token, with no program kept and with all of them?

Every start is a process of its own, `python -m et_jax.generate`. A cold start has an empty folder of programs, a warm
one that which a start before it left.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from et_jax.errors import UsageError
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.results import REPOSITORY
from scripts.measuring.timing import Round

CASES = {
    "off": ["--control", "off"],
    "certified, choosing": ["--control", "certified", "--min-context", "1"],
    "lookup": ["--control", "off", "--draft", "lookup"],
}


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    cases: tuple[str, ...] = setting(tuple(CASES), "what is started", choices=tuple(CASES), quick=("off",))
    rows: int = setting(16, "sequences served at once", least=2, quick=2)
    rounds: int = setting(3, "rounds", least=1, quick=1)


def started(settings: Settings, case: str, kept: str) -> dict[str, float]:
    """Return the seconds until the first token. Raises UsageError where the command fails."""
    command = [sys.executable, "-m", "et_jax.generate", "--model", settings.model, "--max-num-seqs", str(settings.rows)]
    command += ["--prompt", "It was", "--max-tokens", "1", "--temperature", "0", *CASES[case]]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": kept}
    environment = {name: one for name, one in environment.items() if not name.startswith("JAX_")}
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            wall = time.perf_counter() - began
            process.stdout.read()
        if process.returncode:
            said.seek(0)
            raise UsageError(f"{' '.join(command)} ended with {process.returncode}: {said.read()[-500:]}")
    return {"seconds": wall}


def cold(settings: Settings, case: str) -> Round:
    """Return starts with an empty folder each."""

    def run() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as empty:
            return started(settings, case, empty)

    return run


def warm(settings: Settings, case: str, folder: str) -> Round:
    """Return starts with a folder that a start has filled."""
    started(settings, case, folder)
    return partial(started, settings, case, folder)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each case."""
    for case in settings.cases:
        with tempfile.TemporaryDirectory() as folder:
            arms = {"cold": partial(cold, settings, case), "warm": partial(warm, settings, case, folder)}
            yield Group(labels={"case": case}, arms=arms, baseline="cold", rounds=settings.rounds)


FIGURES = {"seconds": Figure(header="seconds", against="ratio")}
DOCUMENT = "evidence.md"

"""How long does the command take to a short answer, with and without programs that an earlier start compiled?

Each round runs `python -m et_jax.generate` in a process of its own. `cold` has an empty folder of programs, `warm` that
of the rounds before. Presets select blocks at every length, so that their larger programs are loaded.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from et_jax.control.presets import PRESETS
from et_jax.errors import UsageError
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.results import REPOSITORY
from scripts.measuring.timing import Round

FIRST = re.compile(r"first after ([\d.]+) s")


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model("smollm2")
    controls: tuple[str, ...] = setting(
        ("off", "share", "certified"), "presets", choices=tuple(PRESETS), quick=("off",)
    )
    checkout: str = experiment.checkout()
    prompt: str = setting("What is the capital of France?", "the prompt")
    chat: bool = setting(True, "whether it is the message of a chat", quick=False)
    tokens: int = setting(40, "tokens of the answer at most", least=1, quick=2)
    rounds: int = setting(3, "rounds in which all take turns", least=2, quick=2)


def started(settings: Settings, tree: Path, control: str, cached: bool) -> Round:
    """Return a round of the command of a checkout, under a preset."""
    flags = ["--model", settings.model, "--control", control, "--max-tokens", str(settings.tokens)]
    flags += ["--temperature", "0", "--prompt", settings.prompt, *["--chat"] * settings.chat]
    flags += [] if control == "off" else ["--min-context", "0"]
    kept = tempfile.TemporaryDirectory()

    def timed() -> dict[str, float]:
        with tempfile.TemporaryDirectory() as fresh:
            there = os.environ | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": kept.name if cached else fresh}
            command = [sys.executable, "-m", "et_jax.generate", *flags]
            began = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=there)
            took = time.perf_counter() - began
        found = FIRST.search(done.stderr)
        if done.returncode or found is None:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise UsageError(f"The command ended with {done.returncode}: {' '.join(said[-1:])}")
        return {"seconds": took, "first_seconds": float(found[1])}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each preset."""
    trees = {"": REPOSITORY} | ({", before": Path(settings.checkout).resolve()} if settings.checkout else {})
    for control in settings.controls:
        arms = {
            f"{name}{version}": partial(started, settings, tree, control, name == "warm")
            for version, tree in trees.items()
            for name in ("cold", "warm")
        }
        yield Group(labels={"control": control}, arms=arms, baseline="warm", rounds=settings.rounds)


FIGURES = {
    "seconds": Figure(header="seconds of the command", against="ratio"),
    "first_seconds": Figure(header="seconds to the first token, after loading"),
}

"""Tokens a second of two versions of the package: this checkout and the one named.

Each version has a process of its own, which waits while the other runs. Before it is timed each process generates for
`--settle` seconds, since programs for few sequences are compiled once some have been decoded.
"""

import itertools
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.serve.engine import load
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.random_folder import random_folder
from scripts.measuring.results import REPOSITORY
from scripts.measuring.shapes import SMOLLM_135M
from scripts.measuring.timing import Round
from scripts.peers import Engine

CONTROLS: dict[str, dict[str, Any]] = {
    **{name: {"control": name} for name in ("off", "guarded", "certified", "adaptive")},
    "lookup": {"control": "off", "draft": "lookup"},
    "self": {"control": "off", "draft": "self"},
}
PROMPT = "It was late in the autumn when the letter came, and nobody in the house would say from whom it was. "


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    checkout: Path = setting(..., "a checkout of the older version")
    models: tuple[str, ...] = setting(
        ("bundled", "135M"), "135M: random weights", choices=("bundled", "135M"), quick=("bundled",)
    )
    controls: tuple[str, ...] = setting(
        ("off", "guarded", "certified", "lookup"), "what decodes", choices=CONTROLS, quick=("off",)
    )
    rows: tuple[int, ...] = setting((2, 16), "sequences at once", least=2, quick=(2,))
    tokens: int = setting(96, "tokens of a sequence", least=1, quick=4)
    settle: float = setting(0.0, "seconds of decoding before", least=0.0)
    rounds: int = setting(7, "rounds in which the versions take turns", least=2, quick=2)

    def __post_init__(self) -> None:
        """Raise UsageError, one sentence, for a value that is out of range or names nothing."""
        super().__post_init__()
        if not (self.checkout / "et_jax/__init__.py").is_file():
            raise UsageError(f"--checkout is {self.checkout}, which has no et_jax; name a checkout of it.")


def started(engine: Engine, prompts: list[list[int]], tokens: int, settle: float) -> Round:
    """Return a round of an engine that has a model."""
    until = time.perf_counter() + settle
    while time.perf_counter() < until:
        engine.generate(prompts, tokens)

    def timed() -> dict[str, float]:
        return {"tokens_per_second": len(prompts) * tokens / engine.generate(prompts, tokens)["seconds"]}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each model, control and number of sequences."""
    places = {"before": settings.checkout.resolve(), "now": REPOSITORY}
    words = load("bundled", max_num_seqs=1).tokenizer.encode(PROMPT)
    with tempfile.TemporaryDirectory() as folder:
        models = {"bundled": "bundled"}
        if "135M" in settings.models:
            models["135M"] = str(random_folder(Path(folder), SMOLLM_135M, "bfloat16"))
        engines = {name: Engine("et_jax", sys.executable, PYTHONPATH=str(place)) for name, place in places.items()}
        for model, control, rows in itertools.product(settings.models, settings.controls, settings.rows):
            prompts = [words[: 2 + number % len(words)] for number in range(2 * rows)]
            room = max(map(len, prompts)) + settings.tokens + 16
            for engine in engines.values():
                engine.load(models[model], "bfloat16", rows, room, max_model_len=room, **CONTROLS[control])
            arms = {
                name: partial(started, engine, prompts, settings.tokens, settings.settle)
                for name, engine in engines.items()
            }
            labels = {"model": model, "control": control, "rows": rows}
            yield Group(labels=labels, arms=arms, baseline="before", rounds=settings.rounds)
        for engine in engines.values():
            engine.end()


EXPERIMENT = Experiment(
    question="How many tokens a second do two versions of the package get, this checkout and the one named?",
    settings=Settings,
    groups=groups,
    figures={"tokens_per_second": Figure(header="tokens a second", against="ratio")},
)

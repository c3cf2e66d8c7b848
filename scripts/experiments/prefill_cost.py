"""What a budget of blocks saves of the time of a long prompt's prefill.

A model of random weights, by default in the shape of SmolLM-135M, prefills a prompt of random tokens: densely, and
with budgets of so many tokens of the context before each segment, those of the blocks of greatest score. Choosing is
included.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from et_jax.control.budget import ConstantBudget
from et_jax.control.controller import Controller
from et_jax.serve.engine import load
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.random_folder import random_folder
from scripts.measuring.shapes import SHAPES, shaped
from scripts.measuring.timing import Round, seconds


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    tokens: int = setting(16_384, "tokens of the prompt", least=2, quick=300)
    budgets: tuple[int, ...] = setting((8192, 4096, 2048, 1024), "tokens that a head reads", least=1, quick=(128,))
    segment: int = setting(512, "tokens of a segment", least=1, quick=64)
    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    dtype: str = setting("bfloat16", "of weights and cache", choices=("bfloat16", "float32"))
    rounds: int = setting(5, "rounds in which all take turns", least=2, quick=2)


def started(settings: Settings, folder: Path, budget: int | None) -> Round:
    """Return the prefill of the prompt, from an empty cache."""
    how = None if budget is None else ConstantBudget(segment=settings.segment, dense_layers=0, tokens=budget)
    model = load(str(folder), dtype=settings.dtype, max_num_seqs=1, prefix_cache=False, control=Controller(budget=how))
    rng = np.random.default_rng(settings.seed)
    prompt = rng.integers(1, 4000, settings.tokens).tolist()
    return lambda: {"seconds": seconds(lambda: model.generate([prompt], max_tokens=1) and None)}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield one group."""
    model = shaped(settings.shape, settings.layers, settings.tokens + 64)
    with tempfile.TemporaryDirectory() as name:
        folder = random_folder(Path(name), model, settings.dtype)
        arms: dict[str, Callable[[], Round]] = {"dense": partial(started, settings, folder, None)}
        arms |= {f"{budget} tokens": partial(started, settings, folder, budget) for budget in settings.budgets}
        yield Group(arms=arms, baseline="dense", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="What does a budget of blocks save of the time of a long prompt's prefill?",
    settings=Settings,
    groups=groups,
    figures={"seconds": Figure(header="seconds", against="ratio")},
    timed=True,
)

"""Does entropy say to how many experts a token should go, better than mass or a constant?

A mixture reads held-out text by the decoder's own step, of every row the first tokens as trained, the others by a rule.
A number of every rule is searched at which tokens go to as many experts as under the constant, on average over tokens
and layers. "shuffled" shows the rule the entropies of other tokens.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.control.controller import Controller
from et_jax.control.experts import Entropy, ExpertRule, Mass, TopK
from et_jax.errors import UsageError
from et_jax.serve.engine import load
from scripts.measuring import experiment, paired, text
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting
from scripts.measuring.results import REPOSITORY
from scripts.measuring.teacher_forced import SIGNALS, Scores, TeacherForced

RULES: dict[str, tuple[Callable[[float], ExpertRule], float, float]] = {
    "mass": (lambda at: Mass(1 - at), 1e-3, 1.0),
    "entropy of the sequence": (lambda at: Entropy(0.0, at, 0.0), 0.1, 1e3),
    "entropy of the sequence, shuffled": (lambda at: Entropy(0.0, at, 0.0), 0.1, 1e3),
    "entropy of the gate": (lambda at: Entropy(1 - at, 1e9, 1.0), 1e-3, 1.0),
    "entropy of both": (lambda at: Entropy(0.0, at, 0.5), 0.1, 1e3),
}
"""By name a rule of a setting, at which it takes the fewer experts the greater that is, and where it is searched."""


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model(str(REPOSITORY / "models/experts"), quick=None)
    text: Path = experiment.text()
    rows: int = setting(128, "rows of text", least=2, quick=2)
    prompt: int = setting(63, "tokens read as trained", least=1, quick=15)
    tokens: int = setting(128, "tokens measured of every row", least=2, quick=16)
    experts: tuple[int, ...] = setting((2, 3), "experts a token", least=1, quick=(2,))
    rules: tuple[str, ...] = setting(
        tuple(RULES), "rules", choices=tuple(RULES), quick=("mass", "entropy of the sequence, shuffled")
    )
    within: float = setting(0.005, "of a budget, over it, that a rule may miss it by", least=1e-4, most=0.5, quick=0.1)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each number of experts."""
    served = load(settings.model, dtype="float32", max_num_seqs=2)
    if served.config.experts is None:
        raise UsageError(f"{served.name} has no experts; name a mixture of experts.")
    rows = text.rows(served, settings.text, settings.rows, settings.prompt + settings.tokens + 1)
    bench = TeacherForced(served, rows, settings.prompt, batch=16)
    trained = bench.dense.entropy
    before = np.concatenate([np.full_like(trained[:, :1], 1e9), trained[:, :-1]], axis=1)
    others = np.random.default_rng(settings.seed).permuted(before.reshape(-1)).reshape(before.shape)
    layers = sum(served.config.experts.layers)

    def figures(scores: Scores) -> dict[str, Any]:
        return {"experts": scores.experts.mean(axis=1) / layers} | scores.by_row("loss", "divergence", "agrees")

    def arm(name: str, number: int) -> dict[str, Any]:
        if name == "constant":
            return figures(bench.run(Controller(experts=TopK(number))))
        make, least, most = RULES[name]
        told = {f"{SIGNALS}entropy": others} if name.endswith("shuffled") else None

        def run(at: float, few: bool) -> Scores:
            return bench.run(Controller(experts=make(at)), given=told, few=few)

        return figures(paired.at_budget(run, "experts", number * layers, least, most, settings.within)[1])

    yield from grouped("experts", settings.experts, ("constant", *settings.rules), arm, "constant")


FIGURES = {
    "experts": Figure(header="experts a token"),
    "loss": Figure(header="loss, nats", against="difference"),
    "divergence": Figure(header="KL from as trained, nats"),
    "agrees": Figure(header="same likeliest token"),
}

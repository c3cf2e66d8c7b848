"""Which budget of blocks for reading prompts loses least at equal shares of blocks read?

Rows of text are read segment by segment, each with the blocks that its budget chooses; the first two segments and the
first layer are dense. The size of a budget is searched until it reads the wanted share of the blocks before the
segments. "entropy" is EntropyInfer's budget, by the change of a head's entropy; "shuffled" gives a head the budget of
another one of its layer. "level" is proportional to the entropy.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from et_jax.control.budget import Budget
from et_jax.serve.engine import load
from scripts.measuring import experiment, paired, text
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting
from scripts.measuring.prompts import Prompts, SizedConstant, SizedEntropy, SizedLevel, SizedMass

ARMS: dict[str, tuple[Callable[..., Budget], dict[str, Any]]] = {
    "constant": (SizedConstant, {}),
    "entropy": (SizedEntropy, {}),
    "entropy, shuffled": (SizedEntropy, {"shuffled": True}),
    "level": (SizedLevel, {}),
    "mass": (SizedMass, {}),
    "newest": (SizedConstant, {"newest": True}),
}
FLOOR, CAP = 0.05, 20.0  # of an entropy budget, which may take as well as give


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(40, "rows of text", least=2, quick=2)
    length: int = setting(0, "tokens of a row, 0 for the model's context", least=0, quick=193)
    segment: int = setting(64, "tokens of a segment", least=16, quick=32)
    shares: tuple[float, ...] = setting((0.5, 0.25, 0.125), "of blocks", least=0.01, most=1.0, quick=(0.5,))
    within: float = setting(0.01, "of a share, over it, that an arm may miss it by", least=1e-4, most=0.5, quick=0.2)
    arms: tuple[str, ...] = setting(tuple(ARMS), "budgets", choices=tuple(ARMS), quick=("constant", "entropy", "mass"))


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of blocks."""
    served = load(settings.model, dtype="float32", max_num_seqs=2)
    length = settings.length or served.max_model_len
    bench = Prompts(served, text.rows(served, settings.text, settings.rows, length), settings.segment)

    def budget(name: str, at: float) -> Budget:
        kind, more = ARMS[name]
        if kind is SizedMass:
            return SizedMass(left=jnp.float32(at / (1.0 + at)), **bench.common)
        floor = {"floor": FLOOR, "cap": CAP} if kind is SizedEntropy else {}
        return kind(tokens=jnp.float32(bench.given.shape[1] / at), **bench.common, **floor, **more)

    def arm(name: str, share: float) -> dict[str, Any]:
        def read(setting: float, few: bool) -> Any:
            return bench.run(budget(name, setting), few)

        found = paired.at_budget(read, "share_read", share, 1e-6, 1e4, within=settings.within)[1]
        by_row = {name: getattr(found, name).mean(axis=1) for name in ("divergence", "loss")}
        return {"share_read": found.share_read} | by_row

    yield from grouped("share", settings.shares, settings.arms, arm, "constant")


FIGURES = {
    "share_read": Figure(header="blocks read"),
    "divergence": Figure(header="KL from dense, nats", against="saving"),
    "loss": Figure(header="loss, nats"),
}

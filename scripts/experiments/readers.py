"""How often the first token of a model's own draft is accepted, by what the draft reads.

Every token meets the dense cache and reads few blocks: those that had the most mass at the token before, the latest,
those of greatest mass by 8-bit keys, or (which nobody knows in time) those of true mass at this token. A token is
accepted where the dense model takes the same: the likeliest, or the one drawn at temperature 1 with the same noise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from et_jax.control import select
from et_jax.control.selector import AnySelector
from et_jax.control.view import BlockView, coded_mass, needing
from et_jax.serve.engine import load
from scripts.measuring import experiment, paired, text
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.teacher_forced import Scores, TeacherForced, guarded, true_mass


def latest(view: BlockView) -> Bool[Array, " n"]:
    """Return the latest tokens: all but a share `tolerance`."""
    count = (1.0 - view.tolerance) * view.length.astype(jnp.float32)
    return select.SinksWindow(1, jnp.round(count).astype(jnp.int32))(view)


@needing("codes")
def by_codes(view: BlockView) -> Bool[Array, " n"]:
    """Return the fewest blocks that leave at most the tolerance of the mass by 8-bit keys."""
    return select.fewest(view, coded_mass(view))


READERS: dict[str, tuple[AnySelector, bool]] = {
    "mass at the token before": (true_mass, False),
    "the same, means for the rest": (true_mass, True),
    "the latest": (latest, False),
    "mass by 8-bit keys": (by_codes, False),
    "mass at this token": (true_mass, False),
}
"""By name what is read, and whether blocks left unread count as their mean value."""


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(12, "rows of text", least=2, quick=2)
    length: int = setting(0, "tokens of a row, 0 for the model's context", least=0, quick=129)
    measured: int = setting(128, "the last tokens of a row, which are measured", least=4, quick=8)
    shares: tuple[float, ...] = setting((0.15, 0.08), "of blocks", least=0.01, most=1.0, quick=(0.5,))
    within: float = setting(0.05, "of a share, over it, that an arm may miss it by", least=1e-4, most=0.5, quick=0.2)
    readers: tuple[str, ...] = setting(
        tuple(READERS), "what drafts read", choices=tuple(READERS), quick=("mass at the token before", "the latest")
    )


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of blocks."""
    served = load(settings.model, dtype="float32", max_num_seqs=2)
    length = settings.length or served.max_model_len
    rows = text.rows(served, settings.text, settings.rows, length)
    bench = TeacherForced(served, rows, length - 1 - settings.measured)

    def arm(name: str, share: float) -> dict[str, Any]:
        masses = {"block_mass": bench.true_masses} if name == "mass at this token" else {}

        def run(left: float, few: bool) -> Scores:
            given = {"tolerance": left} | masses
            return bench.run(guarded(*READERS[name]), given=given, few=few, from_dense=True)

        found = paired.at_budget(run, "share_read", share, 1e-6, 0.9999, settings.within)[1]
        return found.by_row("share_read", "agrees", "same_draw", "divergence")

    for share in settings.shares:
        arms = {name: partial(arm, name, share) for name in settings.readers}
        yield Group(labels={"share": share}, arms=arms, baseline=settings.readers[0])


EXPERIMENT = Experiment(
    question="How often is the first token of a model's own draft accepted, by what the draft reads?",
    settings=Settings,
    groups=groups,
    figures={
        "share_read": Figure(header="blocks read"),
        "agrees": Figure(header="accepted, greedy", against="difference"),
        "same_draw": Figure(header="accepted, temperature 1", against="difference"),
        "divergence": Figure(header="KL from dense, nats"),
    },
    document="drafting.md",
)

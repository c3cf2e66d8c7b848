"""Which selector of blocks loses least at equal shares of blocks read, and what bytes does it move?

Rows of held-out text at full context are read as prompts but for the last tokens, which pass one by one through the
decoder's step. Each selector has one setting, its tolerance, which is searched until it reads the wanted share; Quest
and the window take the share itself. The first and the newest block are always read. `oracle` knows the true attention
mass of each block at each token, from the dense run, and reads the fewest blocks that leave a share of it. Bytes are
those of blocks read and of what was read to choose.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from et_jax.control import contribution, select
from et_jax.control.expected_error import ExpectedError
from et_jax.control.selector import AnySelector
from et_jax.control.view import BlockView, coded_mass
from scripts.measuring import paired
from scripts.measuring.experiment import Figure, Group, grouped, setting
from scripts.measuring.selectors import guarded, quest, true_mass
from scripts.measuring.teacher_forced import FIGURES as OF_SCORES
from scripts.measuring.teacher_forced import Forced, Scores


def window(view: BlockView) -> Bool[Array, " n"]:
    """Return the first tokens and the last, a share `tolerance` of all (StreamingLLM)."""
    return select.SinksWindow(16, jnp.round(view.tolerance * view.length.astype(jnp.float32)).astype(jnp.int32))(view)


FIGURES = OF_SCORES | {"share_bytes": Figure(header="bytes moved")}
PAPER = partial(select.ActiveSet, contribution.influence)
SELECTORS: dict[str, tuple[AnySelector, bool]] = {
    "sinks and window": (window, False),
    "quest": (quest, False),
    "mean-key mass": (select.TopMass(), False),
    "8-bit mass, certified": (select.Certified(select.coded_bounds), True),
    "influence, 8-bit mass": (PAPER(coded_mass), False),
    "influence, last mass and box": (PAPER(look_every=64), False),
    "expected error": (ExpectedError(), True),
    "oracle": (true_mass, False),
}
"""By name a selector, and whether blocks left unread count as their mean value."""


@dataclass(frozen=True, kw_only=True)
class Settings(Forced):
    """Flags of the experiment."""

    shares: tuple[float, ...] = setting((0.5, 0.25), "shares of blocks read", least=0.01, most=1.0, quick=(0.5,))
    within: float = setting(0.01, "of a share, over it, that an arm may miss it by", least=1e-4, most=0.5, quick=0.1)
    selectors: tuple[str, ...] = setting(
        tuple(SELECTORS), "selectors", choices=tuple(SELECTORS), quick=("quest", "8-bit mass, certified", "oracle")
    )


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of blocks."""
    bench = settings.bench()

    def run(name: str, tolerance: float, few: bool = False) -> Scores:
        masses = {"block_mass": bench.true_masses} if name == "oracle" else {}
        return bench.run(guarded(*SELECTORS[name]), given={"tolerance": tolerance} | masses, few=few)

    def arm(name: str, share: float) -> dict[str, Any]:
        if name == "dense":
            return bench.dense.by_row(*FIGURES)
        if name in ("quest", "sinks and window"):  # the budget falls as what is left unread rises

            def spend(left: float, few: bool) -> Scores:
                return run(name, 1.0 - left, few)

            return paired.at_budget(spend, "share_read", share, 1e-3, 1.0 - 1e-3, settings.within)[1].by_row(*FIGURES)
        found = paired.at_budget(partial(run, name), "share_read", share, 1e-9, 1e6, settings.within)[1]
        return found.by_row(*FIGURES)

    yield from grouped("share", settings.shares, ("dense", *settings.selectors), arm, "quest")


DOCUMENT = "measurements.md"

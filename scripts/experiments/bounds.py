"""How many blocks does each certified bound on attention mass open at a tolerance?

Every arm proves that no head leaves more than the tolerance of its mass unread: from the box of a block's keys, from
the box and the mean key (chord), or from 8-bit copies of the keys. "true mass" knows each block's mass, from the dense
run, and opens the fewest blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from et_jax.control import select
from et_jax.control.selector import AnySelector
from scripts.measuring.experiment import Figure, Group, grouped, setting
from scripts.measuring.selectors import guarded, true_mass
from scripts.measuring.teacher_forced import Forced

BOUNDS: dict[str, AnySelector] = {
    "box": select.Certified(select.box_bounds),
    "chord": select.Certified(select.chord_bounds),
    "8-bit keys": select.Certified(select.coded_bounds),
    "true mass": true_mass,
}


@dataclass(frozen=True, kw_only=True)
class Settings(Forced):
    """Flags of the experiment."""

    tolerances: tuple[float, ...] = setting(
        (0.5, 0.2, 0.1, 0.05, 0.01), "attention mass left unread", least=0.0, most=1.0, quick=(0.0, 0.2)
    )


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each tolerance."""
    bench = settings.bench()

    def arm(name: str, tolerance: float) -> dict[str, Any]:
        masses = {"block_mass": bench.true_masses} if name == "true mass" else {}
        scores = bench.run(guarded(BOUNDS[name]), given={"tolerance": tolerance} | masses)
        least = {"least_kept_mass": scores.kept_mass.min(axis=1)}
        return scores.by_row("share_read", "share_bytes", "divergence") | least

    yield from grouped("tolerance", settings.tolerances, BOUNDS, arm, "true mass")


FIGURES = {
    "share_read": Figure(header="blocks read", against="difference"),
    "share_bytes": Figure(header="bytes moved"),
    "least_kept_mass": Figure(header="least mass read, proved"),
    "divergence": Figure(header="KL from dense, nats"),
}

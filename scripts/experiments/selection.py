"""Which selector of blocks loses least, by the bytes it moves?

Rows of held-out text are read as prompts but for the last tokens, which pass one by one through the decoder's step.
Each selector runs at several tolerances, so that it gives a curve: KL from dense attention over bytes. Quest and the
window take a share of the blocks as their tolerance. Presets run as they are; the other selectors always read the first
and the newest block. `oracle` knows the true attention mass of each block at each token, from the dense run. `chance`
reads blocks at random. Bytes are those of blocks read and of what was read to choose: nothing, for these two and the
window.

A second group compares the selectors at equal bytes, in the mean of all rows: each row's KL is interpolated between two
settings, by logarithms.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from et_jax.control import contribution, select
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.view import BlockView, coded_mass
from et_jax.types import replace
from scripts.measuring.experiment import Figure, Group, Missed, setting
from scripts.measuring.selectors import guarded, keeping, quest, true_mass, window
from scripts.measuring.teacher_forced import FIGURES as OF_SCORES
from scripts.measuring.teacher_forced import Forced, Scores

FIGURES = OF_SCORES | {"share_bytes": Figure(header="bytes moved")}
LEAST = 1e-9  # nats, below which float32 tells no two distributions apart


def chance(view: BlockView) -> Bool[Array, " n"]:
    """Return each block with the probability `tolerance`, by a hash of the length and the block."""
    key = jax.random.fold_in(jax.random.key(0), view.length)
    return (view.num_tokens > 0) & (jax.random.uniform(key, view.num_tokens.shape) < view.tolerance)


SHARES = (0.5, 0.25, 0.125, 0.0625)
CURVES: dict[str, tuple[Callable[[float], Controller], tuple[float, ...]]] = {
    "quest": (lambda _: guarded(quest), SHARES),
    "sinks and window": (lambda _: guarded(window), SHARES),
    "chance": (lambda _: guarded(chance), SHARES),
    "mean-key mass": (lambda _: guarded(select.TopMass()), (0.02, 0.1, 0.3, 0.6)),
    "influence, 8-bit mass": (
        lambda _: guarded(select.ActiveSet(contribution.influence, coded_mass)),
        (0.003, 0.02, 0.1, 0.5),
    ),
    "paper": (lambda at: preset("paper", tolerance=at), (0.01, 0.05, 0.2, 0.8)),
    "guarded": (lambda at: preset("guarded", tolerance=at), (0.01, 0.05, 0.2, 0.8)),
    "certified": (lambda at: preset("certified", tolerance=at), (0.02, 0.05, 0.2, 0.5)),
    "adaptive": (lambda at: preset("adaptive", tolerance=at), (1e-5, 1e-4, 1e-3, 1e-2)),
    **{
        f"adaptive, every {n}th token": (
            lambda at, n=n: keeping(preset("adaptive", tolerance=at), n),
            (1e-5, 1e-4, 1e-3, 1e-2),
        )
        for n in (4, 8, 16)
    },
    "share": (lambda at: preset("share", tolerance=1.0 - at), SHARES),
    "oracle": (lambda _: guarded(true_mass), (0.01, 0.05, 0.2, 0.5)),
}
"""By name a selector's controller at a tolerance, and the tolerances that it runs at."""
PRESETS = ("paper", "guarded", "certified", "share", *(name for name in CURVES if name.startswith("adaptive")))
"""Those whose laws set the tolerance."""
UNSCORED = ("sinks and window", "chance", "oracle")  # that inspect no block
DENSE = "dense"


class Settings(Forced):
    """Flags of the experiment."""

    selectors: tuple[str, ...] = setting(
        tuple(CURVES), "selectors", choices=tuple(CURVES), quick=("quest", "certified")
    )
    bytes: tuple[float, ...] = setting((0.5, 0.375, 0.25), "shares of bytes to compare at", least=0.01, quick=(0.5,))


def at_bytes(
    curve: list[tuple[Float[np.ndarray, " r"], Float[np.ndarray, " r"]]], wanted: float
) -> Float[np.ndarray, " r"]:
    """Return each row's KL at a share of bytes, on the line between its two neighbours, by the logarithm of KL.

    `curve` has the bytes and the KL of each row at each setting. Raises Missed where no setting moves as much or as
    little in the mean.
    """
    points = sorted(curve, key=lambda point: point[0].mean())
    least, most = points[0][0].mean(), points[-1][0].mean()
    if not least <= wanted <= most:
        raise Missed(f"its settings move {least:.3f} to {most:.3f} of the bytes")
    right = next(number for number, point in enumerate(points) if point[0].mean() >= wanted)
    (low, worse), (high, better) = points[max(right - 1, 0)], points[right]
    share = (wanted - low.mean()) / max(high.mean() - low.mean(), 1e-9)
    worse, better = (np.log(np.maximum(each, LEAST)) for each in (worse, better))
    return np.exp(worse + share * (better - worse))


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group of all selectors at all tolerances, and one for each share of bytes."""
    bench = settings.bench()

    @cache
    def run(name: str, at: float) -> Scores:
        given = {} if name in PRESETS else {"tolerance": at}
        masses = {"block_mass": bench.true_masses} if name == "oracle" else {}
        scores = bench.run(CURVES[name][0](at), given=given | masses)
        return replace(scores, share_bytes=scores.share_read) if name in UNSCORED else scores

    def point(name: str, at: float) -> dict[str, Any]:
        scores = bench.dense if name == DENSE else run(name, at)
        return scores.by_row(*FIGURES)

    def equal(name: str, wanted: float) -> dict[str, Any]:
        found = [run(name, at).by_row("share_bytes", "divergence") for at in CURVES[name][1]]
        return {"divergence": at_bytes([(one["share_bytes"], one["divergence"]) for one in found], wanted)}

    arms = {DENSE: partial(point, DENSE, 0.0)}
    arms |= {f"{name} {at:g}": partial(point, name, at) for name in settings.selectors for at in CURVES[name][1]}
    yield Group(labels={"at": "tolerance"}, arms=arms)
    for wanted in settings.bytes:
        compared = {name: partial(equal, name, wanted) for name in settings.selectors}
        baseline = "quest" if "quest" in settings.selectors else None
        yield Group(labels={"at": f"{wanted:g} of the bytes"}, arms=compared, baseline=baseline)


PLOT = ("share_bytes", "divergence")

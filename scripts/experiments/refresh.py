"""When should a sequence select its blocks anew, and by entropy or by count?

Quest selects a share of the blocks, and the tokens up to the next selection read the same blocks. `by count` selects at
every n-th token. The other arms select as often at other moments: at ticks of a clock of entropy (the sum of entropies,
or of their falls, as the paper has it), before the tokens of highest and of lowest entropy, at ticks of shuffled
entropies, and at random. Entropies are those that the dense model has of a token before it is read.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from et_jax.control import refresh
from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.types import replace
from scripts.measuring.experiment import Figure, Group, setting
from scripts.measuring.selectors import guarded, quest
from scripts.measuring.teacher_forced import FIGURES as OF_SCORES
from scripts.measuring.teacher_forced import Forced

FIGURES = {
    "share_read": OF_SCORES["share_read"],
    "share_bytes": Figure(header="bytes moved"),
    "divergence": OF_SCORES["divergence"],
}
CONTROLLER = replace(guarded(quest), law=chain(Controller.law, refresh.Every(1)))
BASELINE = "by count"


class Settings(Forced):
    """Flags of the experiment."""

    shares: tuple[float, ...] = setting((0.25, 0.125), "of blocks", least=0.01, most=1.0, quick=(0.25,))
    intervals: tuple[int, ...] = setting((1, 4, 16), "tokens a selection, in the mean", least=1, quick=(1, 4))


def ticks(steps: Float[np.ndarray, "r m"], count: int) -> Bool[np.ndarray, "r m"]:
    """Return the first moment, and those at which a clock that advances by `steps` enters one more of `count` parts."""
    time = np.cumsum(steps, axis=1, dtype=np.float64)
    part = np.floor(time / time[:, -1:] * count * (1 - 1e-9))
    return np.diff(part, axis=1, prepend=-1) > 0


def greatest(scores: Float[np.ndarray, "r m"], count: int) -> Bool[np.ndarray, "r m"]:
    """Return the first moment of each row, and those of the greatest scores: `count` in all."""
    scores = np.where(np.arange(scores.shape[1]) == 0, np.inf, scores)
    place = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1)
    return place < count


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of blocks and each interval."""
    bench, rng = settings.bench(), np.random.default_rng(settings.seed)
    now = bench.dense.entropy
    entropy = np.concatenate([now[:, :1], now[:, :-1]], axis=1)
    falls = np.maximum(0.0, -np.diff(entropy, axis=1, prepend=entropy[:, :1])) + 1e-6  # a clock that never stands

    def arm(share: float, moments: Bool[np.ndarray, "r m"]) -> dict[str, Any]:
        assert moments[:, 0].all(), "what is read again must have been selected"
        return bench.run(CONTROLLER, given={"tolerance": share, "refresh": moments}).by_row(*FIGURES)

    for share in settings.shares:
        for interval in settings.intervals:
            count = -(-entropy.shape[1] // interval)
            moments = {BASELINE: np.broadcast_to(np.arange(entropy.shape[1]) % interval == 0, entropy.shape)}
            if interval > 1:
                moments |= {
                    "ticks of entropy": ticks(entropy, count),
                    "ticks of its falls": ticks(falls, count),
                    "ticks of shuffled entropy": ticks(rng.permuted(entropy, axis=1), count),
                    "highest entropy": greatest(entropy, count),
                    "lowest entropy": greatest(-entropy, count),
                    "at random": greatest(rng.random(entropy.shape), count),
                }
            arms = {name: partial(arm, share, one) for name, one in moments.items()}
            baseline = BASELINE if interval > 1 else None
            yield Group(labels={"share": share, "interval": interval}, arms=arms, baseline=baseline)

"""Does it matter that the sensitivity of each head was measured, at equal shares of blocks read?

`ExpectedError` chooses blocks by a sensitivity for each query head. "calibrated" has the measured ones, "equal" one
number for all, and "shuffled" the measured ones dealt out among the heads of all layers, five times: the mean over the
deals is each row's figure. Rows of held-out text are read as prompts but for the last tokens, which pass one by one
through the decoder's step; the tolerance of each arm is searched until it reads the wanted share. Blocks left unread
count as their mean value.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from et_jax.control.expected_error import ExpectedError
from et_jax.errors import UsageError
from et_jax.models.calibration import Calibration, equal_heads
from et_jax.types import Table
from scripts.measuring import paired
from scripts.measuring.experiment import Group, grouped, setting
from scripts.measuring.selectors import guarded
from scripts.measuring.teacher_forced import FIGURES, Forced, Scores, TeacherForced


class Settings(Forced):
    """Flags of the experiment."""

    model: str = setting("smollm2", "a model, or a folder with one", kind="model", quick="bundled-small")
    length: int = setting(2048, "tokens of a row", least=64, quick=161)
    shares: tuple[float, ...] = setting((0.5, 0.25), "shares of blocks read", least=0.01, most=1.0, quick=(0.5,))
    deals: int = setting(5, "ways to deal the measured sensitivities out", least=1, quick=1)
    within: float = setting(0.02, "of a share, over it, that an arm may miss it by", least=1e-4, most=0.5, quick=0.2)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each share of blocks."""
    bench = settings.bench()
    known = bench.model.decoder_config.calibration
    if known.sensitivity is None:
        raise UsageError(f"{settings.model} was not measured; run python -m et_jax.calibrate --model {settings.model}.")
    measured, rng = known.sensitivity.array, np.random.default_rng(settings.seed)
    dealt = [rng.permutation(measured.reshape(-1)).reshape(measured.shape) for _ in range(settings.deals)]
    benches: dict[str, list[TeacherForced]] = {
        "calibrated": [bench],
        "equal": [bench.calibrated(equal_heads(bench.model.config))],
        "shuffled": [bench.calibrated(Calibration(sensitivity=Table(one))) for one in dealt],
    }

    def at_share(one: TeacherForced, share: float) -> Scores:
        def spend(tolerance: float, few: bool) -> Scores:
            return one.run(guarded(ExpectedError(), residual=True), given={"tolerance": tolerance}, few=few)

        return paired.at_budget(spend, "share_read", share, 1e-9, 1e6, settings.within)[1]

    def arm(name: str, share: float) -> dict[str, Any]:
        scores = [bench.dense] if name == "dense" else [at_share(one, share) for one in benches[name]]
        found = [one.by_row(*FIGURES) for one in scores]
        return {figure: np.mean([one[figure] for one in found], axis=0) for figure in found[0]}

    yield from grouped("share", settings.shares, ("dense", *benches), arm, "equal")

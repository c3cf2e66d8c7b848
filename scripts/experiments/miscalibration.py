"""Does an overconfident model read too few blocks, and do guards help?

The stress test of Entropic-Time Inference, section 6.2. The decision sees the entropy of logits that are multiplied by
a scale: above 1 the model is overconfident, below 1 underconfident. The logits themselves stay, so that KL from dense
attention is that of the blocks alone. A temperature fitted to the scaled logits is the scale times the old one, which
gives the entropies of scale 1: recalibration undoes this error, and has no arm.

Rows of held-out text are read as prompts but for the last tokens, which pass one by one through the decoder's step.
"unguarded" is the paper's threshold without its guards: no floor under the entropy, no limit on the rate of theta, no
least number of blocks. Preset `paper` has all three, `guarded` also reads the first and the last tokens, and the
tolerance of `certified` follows no entropy of the next token: it shows what does not depend on calibration.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from et_jax.control.controller import Controller
from et_jax.control.guards import RateLimited
from et_jax.control.presets import preset
from et_jax.types import replace
from scripts.measuring.experiment import Figure, Group, setting
from scripts.measuring.teacher_forced import FIGURES as OF_SCORES
from scripts.measuring.teacher_forced import Forced

FIGURES = OF_SCORES | {
    "share_bytes": Figure(header="bytes moved"),
    "theta": Figure(header="theta"),
    "theta_step": Figure(header="change of theta a token"),
}


def unguarded(theta: float) -> Controller:
    """Return the law of theta and the selector of preset `paper` without the guards around them."""
    paper: Any = preset("paper", tolerance=theta)
    floored: Any = next(law.law for law in paper.law.laws if isinstance(law, RateLimited))
    return Controller(law=floored.law, selector=paper.selector.selector)


CONTROLLERS = {"unguarded": unguarded} | {
    name: lambda theta, name=name: preset(name, tolerance=theta) for name in ("paper", "guarded", "certified")
}


class Settings(Forced):
    """Flags of the experiment."""

    model: str = setting("smollm2", "a model, or a folder with one", kind="model", quick="bundled-small")
    length: int = setting(2048, "tokens of a row", least=64, quick=161)
    controls: tuple[str, ...] = setting(tuple(CONTROLLERS), "controllers", choices=tuple(CONTROLLERS), quick=("paper",))
    scales: tuple[float, ...] = setting((0.5, 2.0, 4.0), "of the logits", least=0.01, most=100.0, quick=(100.0,))
    theta: float = setting(0.8, "the tolerance of the presets", least=0.0, most=1.0)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each controller, with an arm for each scale."""
    bench = settings.bench()
    known = bench.calibration
    benches = {
        scale: bench.calibrated(replace(known, temperature=known.temperature / scale))
        for scale in (1.0, *settings.scales)
    }

    def arm(name: str, scale: float) -> dict[str, Any]:
        scores = benches[scale].run(CONTROLLERS[name](settings.theta), keep=("tolerance",))
        theta = np.asarray(scores.kept["tolerance"], np.float64)
        by_theta = {"theta": theta.mean(axis=1), "theta_step": np.abs(np.diff(theta, axis=1)).mean(axis=1)}
        return scores.by_row(*OF_SCORES, "share_bytes") | by_theta

    for name in settings.controls:
        arms = {f"logits x {scale:g}": partial(arm, name, scale) for scale in benches}
        yield Group(labels={"control": name}, arms=arms)

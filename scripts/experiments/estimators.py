"""How well do entropies from the k likeliest tokens agree with the exact one?

The second half of each row of held-out text counts, where the model has context.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from et_jax.control import entropy
from et_jax.serve.engine import load
from et_jax.tasks.calibration import held_out_logits
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Base, Figure, Group, grouped, setting

ROUNDING = 1e-4  # nats by which the truth may miss the interval
ESTIMATORS: dict[str, Callable[[int], entropy.Estimator]] = {
    "top k": entropy.TopKEstimator,
    "tail corrected, share 1/2": lambda k: entropy.TailCorrectedEstimator(k, 0.5),
    "tail corrected, share 1": lambda k: entropy.TailCorrectedEstimator(k, 1.0),
}


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(8, "rows of text", least=2, quick=2)
    length: int = setting(0, "tokens of a row, 0 for the model's context", least=0, quick=65)
    listed: tuple[int, ...] = setting((4, 16, 64), "likeliest tokens that are listed", least=2, quick=(4,))


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each number of tokens listed."""
    served = load(settings.model, dtype="float32", max_num_seqs=2)
    rows = text.rows(served, settings.text, settings.rows, settings.length or served.max_model_len)
    logits, _ = held_out_logits(served.config, served.params, rows)
    truth = entropy.entropy(entropy.moments(logits))

    def arm(name: str, k: int) -> dict[str, Any]:
        estimator = ESTIMATORS[name](k)
        found = jax.jit(lambda z: estimator(jax.nn.log_softmax(z, axis=-1), entropy.moments(z)))(logits)
        outside = (truth < found.low - ROUNDING) | (truth > found.high + ROUNDING)
        each = {"error": np.abs(found.entropy - truth), "width": found.high - found.low, "outside": outside}
        return {figure: np.asarray(one, np.float64).reshape(len(rows), -1).mean(axis=1) for figure, one in each.items()}

    yield from grouped("k", settings.listed, ESTIMATORS, arm, "top k")


FIGURES = {
    "error": Figure(header="absolute error, nats", against="saving"),
    "width": Figure(header="width of the interval, nats"),
    "outside": Figure(header="truth outside the interval"),
}

"""Arms compared fairly: each at the same budget, row by row, with intervals."""

import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from scripts.measuring.experiment import Missed

RESAMPLES = 10_000


def matched[T](
    run: Callable[[float], tuple[float, T]],
    wanted: float,
    least: float,
    most: float,
    *,
    within: float = 1e-3,
    start: float | None = None,
    or_nearest: bool = False,
) -> tuple[float, T]:
    """Return the setting at which a budget is spent to within a part `within` of it, and what the run there gave.

    `run` answers the budget and the result at a setting between `least` and `most`, over which the budget
    does not rise. The search begins at `start`, where it is known to be near, and strides until the budget lies
    between two settings; between two the next is guessed on the line between them, by logarithms.

    Where no setting comes near enough, Missed is raised, with the nearest, or that one is returned if it will do.
    """
    low, high, nearest = math.log(least), math.log(most), (math.inf, 0.0, 0.0)
    more, less = 1.0, 0.0  # spent at either end: all, and nothing
    at, stride = None if start is None else math.log(start), 0.05
    for _ in range(40):
        if at is None:
            at = low + min(max((more - wanted) / max(more - less, 1e-9), 0.1), 0.9) * (high - low)
        spent, result = run(math.exp(at))
        if abs(spent - wanted) <= within * wanted:
            return math.exp(at), result
        nearest = min(nearest, (abs(spent - wanted), spent, math.exp(at)))
        if spent > wanted:
            low, more, ahead = at, spent, at + stride
        else:
            high, less, ahead = at, spent, at - stride
        strides = start is not None and (more == 1.0 or less == 0.0) and low < ahead < high
        at, stride = ahead if strides else None, 3 * stride
    if or_nearest:
        return nearest[2], run(nearest[2])[1]
    raise Missed(f"no setting from {least:g} to {most:g} spends {wanted:.4f}; the nearest is {nearest[1]:.4f}")


def at_budget[T](
    run: Callable[[float, bool], T],
    figure: str,
    wanted: float,
    least: float,
    most: float,
    within: float,
    start: float | None = None,
) -> tuple[float, T]:
    """Return the setting at which an arm spends a budget, the mean of a figure, and what it gave there.

    `run` takes a setting between `least` and `most`, and whether a few rows are enough, on which the search begins
    unless it is known to be near `start`; the figure does not rise with the setting. Raises Missed where no setting
    comes within a part `within` of the budget.
    """

    def spend(setting: float, few: bool) -> tuple[float, T]:
        found = run(setting, few)
        return float(np.mean(getattr(found, figure))), found

    if start is None:
        start, _ = matched(lambda at: spend(at, True), wanted, least, most, within=2 * within)
    return matched(lambda at: spend(at, False), wanted, least, most, within=within, start=start)


def saving(arm: Float[np.ndarray, " r"], baseline: Float[np.ndarray, " r"]) -> dict[str, float]:
    """Return how much less the sum of an arm is than its baseline's, as a share, with an interval.

    `low` and `high` contain it with 95%, resampled over the rows that both have.
    """
    drawn = np.random.default_rng(0).integers(len(arm), size=(RESAMPLES, len(arm)))
    shares = 1.0 - arm[drawn].sum(1) / baseline[drawn].sum(1)
    low, high = np.percentile(shares, [2.5, 97.5])
    return {"share": float(1.0 - arm.sum() / baseline.sum()), "low": float(low), "high": float(high)}


def interval(rows: Float[np.ndarray, " r"]) -> tuple[float, float]:
    """Return what holds the mean over rows with 95%, resampled row by row."""
    drawn = np.random.default_rng(0).integers(len(rows), size=(RESAMPLES, len(rows)))
    low, high = np.percentile(rows[drawn].mean(1), [2.5, 97.5])
    return float(low), float(high)

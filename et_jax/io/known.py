"""Figures of which some are not known: NaN, infinite or None. They are told as missing, never as a number."""

import math
from collections.abc import Iterable

Figure = float | int


def known(figures: Iterable[Figure | None]) -> list[Figure]:
    """Return those that are finite numbers."""
    return [figure for figure in figures if figure is not None and math.isfinite(figure)]


def known_or_none(figure: Figure | None) -> Figure | None:
    """Return a figure, None where it is no finite number: JSON has no other word for it."""
    return None if figure is None or not math.isfinite(figure) else figure


def told(figure: Figure, form: str) -> str:
    """Return a figure in words, by a format such as `.3g`; "unknown" where it is no finite number."""
    return format(figure, form) if math.isfinite(figure) else "unknown"


def mean(figures: Iterable[Figure | None]) -> float:
    """Return the mean of those that are known, NaN where none is."""
    there = known(figures)
    return sum(there) / len(there) if there else math.nan


def ratio(figure: Figure, whole: Figure) -> float:
    """Return `figure / whole`; NaN where that is no number."""
    return figure / whole if whole else math.nan

"""Figures that may be unknown: NaN, infinite or None. They are reported as missing, never as a number."""

import math
from collections.abc import Iterable

Figure = float | int


def known(figures: Iterable[Figure | None]) -> list[Figure]:
    """Return those that are finite numbers."""
    return [figure for figure in figures if figure is not None and math.isfinite(figure)]


def known_or_none(figure: Figure | None) -> Figure | None:
    """Return a figure, None unless it is a finite number, because JSON has no other representation."""
    return None if figure is None or not math.isfinite(figure) else figure


def formatted(figure: Figure, form: str) -> str:
    """Return a figure as text, in a format such as `.3g`; "unknown" unless it is a finite number."""
    return format(figure, form) if math.isfinite(figure) else "unknown"


def mean(figures: Iterable[Figure | None]) -> float:
    """Return the mean of the known figures, NaN if there is none."""
    there = known(figures)
    return sum(there) / len(there) if there else math.nan


def ratio(figure: Figure, total: Figure) -> float:
    """Return `figure / total`; NaN for a total of 0."""
    return figure / total if total else math.nan

"""Drawing of figures: Vega-Lite specifications over columns of plain numbers.

If there are more tokens than points on a screen, a point is the mean of several of them, with a band
from the least to the greatest if they differ.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

MOST_POINTS = 1500  # of a line: about two per pixel of a wide screen
HEIGHT = 220  # pixels
LEGEND = {"title": None, "orient": "top"}
# Colours are names that the page defines, once for a light screen and once for a dark one.
WARM, GREY, BLUE, GREEN, PURPLE = "$warm", "$grey", "$blue", "$green", "$purple"

Columns = Mapping[str, Sequence[Any]]
Spec = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: its title, a sentence on how to read it, what it shows in words, and the drawing.

    `columns` are the data that `spec` calls by the name `table`. `by_token` is true if x counts tokens.
    """

    title: str
    caption: str
    words: str
    spec: Mapping[str, Any]
    columns: Columns
    by_token: bool = False


def binned(values: Float[np.ndarray, " n"], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return for at most `most` equal groups of values their middle (from 1), mean, least and greatest value.

    Unknown values, NaN, are ignored; a group of only such values is NaN.
    """
    size = -(-len(values) // most)
    groups = -(-len(values) // size)
    padded = np.full(groups * size, np.nan)
    padded[: len(values)] = values
    grouped = padded.reshape(groups, size)
    known = ~np.isnan(grouped)
    count = known.sum(axis=1)
    mean = np.where(count > 0, np.where(known, grouped, 0.0).sum(axis=1) / np.maximum(count, 1), np.nan)
    least = np.where(count > 0, np.where(known, grouped, np.inf).min(axis=1), np.nan)
    greatest = np.where(count > 0, np.where(known, grouped, -np.inf).max(axis=1), np.nan)
    start = np.arange(groups) * size
    middle = (start + 1 + np.minimum(start + size, len(values))) / 2
    return middle, mean, least, greatest


def plain(values: np.ndarray) -> list[float | None]:
    """Return numbers for JSON, to five figures; None for unknown ones."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.astype(np.float64)]


def chart(kind: str, height: int = HEIGHT, *, mark: Spec | None = None, **encoding: Spec) -> Spec:
    """Return a drawing of one kind of mark, with tooltips."""
    return {"height": height, "mark": {"type": kind, **(mark or {}), "tooltip": True}, "encoding": encoding}


def axis(field: str, kind: str = "quantitative", **more: Any) -> Spec:
    """Return the encoding of a column as an axis, or an order."""
    return {"field": field, "type": kind, **more}


def groups(field: str) -> Spec:
    """Return a column of few values as an axis with upright labels."""
    return axis(field, "ordinal", axis={"labelAngle": 0})


def shade(field: str) -> Spec:
    """Return a column of shares as the colours of a heat map."""
    return {"field": field, "type": "quantitative", "scale": {"domain": [0, 1], "scheme": "$heat"}, "title": "share"}


def over_tokens(layers: list[Spec], title: str, tokens: int) -> Spec:
    """Return a drawing of layers over tokens, with a rule at the selected token: the signal `at`."""
    x = {"field": "token", "type": "quantitative", "title": "token"}
    rule = {
        "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.8},
        "data": {"values": [{}]},
        "encoding": {"x": {"datum": {"expr": "at"}}},
    }
    return {
        "height": HEIGHT,
        "params": [{"name": "at", "value": 1}],
        "encoding": {
            "x": x | {"scale": {"domain": [1, max(tokens, 2)], "nice": False}},
            "y": {"type": "quantitative", "title": title},
        },
        "layer": [*layers, rule],
    }


def lines(colours: Mapping[str, str], points: Sequence[str] = ()) -> list[Spec]:
    """Return a line for each column in its colour, dots for those of `points`, with one legend for all."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    legend = LEGEND if len(colours) > 1 else None
    dots = {"type": "point", "filled": True, "size": 14, "opacity": 0.7, "clip": True}
    return [
        {
            "mark": dots if name in points else {"type": "line", "clip": True, "strokeWidth": 1.5},
            "encoding": {"y": {"field": name}, "color": {"datum": name, "scale": scale, "legend": legend}},
        }
        for name in colours
    ]


def band(colour: str) -> Spec:
    """Return the area between the columns `least` and `greatest`."""
    return {
        "mark": {"type": "area", "opacity": 0.25, "clip": True, "color": colour},
        "encoding": {"y": {"field": "least"}, "y2": {"field": "greatest"}},
    }

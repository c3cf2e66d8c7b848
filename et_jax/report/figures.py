"""The figures of a report, as Vega-Lite specifications over columns of plain numbers.

Where there are more tokens than a screen has points, a point stands for several of them: it has their mean, and a band
from the least to the greatest where that says more.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from et_jax.io.known import known, ratio, told
from et_jax.serve.completions import Completion, TokenTrace

MOST_POINTS = 1500  # of a line: about two to a pixel of a wide screen
MOST_MOMENTS = 120  # columns of a heat map over tokens
_HEIGHT = 220  # pixels
_LEGEND = {"title": None, "orient": "top"}
# Colours are names that the page resolves, one set for a light screen and one for a dark one.
WARM, GREY, BLUE, GREEN, PURPLE = "$warm", "$grey", "$blue", "$green", "$purple"

Columns = Mapping[str, Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: its title, a sentence on how to read it, what it shows in words, and the drawing.

    `columns` are the data that `spec` calls by the name `table`. `by_token` tells that x counts tokens.
    """

    title: str
    caption: str
    words: str
    spec: Mapping[str, Any]
    columns: Columns
    by_token: bool = False


def of_completion(completion: Completion) -> list[Figure]:
    """Return the figures of one continuation, those that would show nothing left out."""
    rows = completion.trace
    found = [_entropy(rows), _temperature(rows), _reading(rows), *_heat(rows), _progress(rows)]
    return [figure for figure in [*found, _drafts(rows), _speakers(rows), _guards(rows)] if figure is not None]


def binned(values: Float[np.ndarray, " n"], most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return where each of at most `most` equal groups of values is (from 1, its middle), its mean, least, greatest.

    Values that are not known, NaN, count for nothing; a group of them alone is NaN.
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
    """Return numbers for JSON, to five figures; None for those that are not known."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values.astype(np.float64)]


def _entropy(rows: Sequence[TokenTrace]) -> Figure:
    token, mean, least, greatest = binned(np.array([row.entropy for row in rows]), MOST_POINTS)
    surprisal = binned(np.array([row.surprisal for row in rows]), MOST_POINTS)[1]
    columns = {
        "token": plain(token),
        "entropy": plain(mean),
        "least": plain(least),
        "greatest": plain(greatest),
        "surprisal": plain(surprisal),
    }
    lines = _lines({"surprisal": GREY, "entropy": WARM}, points=["surprisal"])
    band = [_band(WARM)] if len(token) < len(rows) else []
    return Figure(
        title="Entropy and surprisal",
        caption=f"Entropy of the next token, and the surprisal of the one that was taken, in nats.{_grouped(rows)}",
        words=f"Entropy by token: {_told([row.entropy for row in rows])} nats. "
        f"Surprisal: {_told([row.surprisal for row in rows])} nats.",
        spec=_over_tokens([*band, *lines], "nats", len(rows)),
        columns=columns,
        by_token=True,
    )


def _temperature(rows: Sequence[TokenTrace]) -> Figure:
    token, mean, least, greatest = binned(np.array([row.temperature for row in rows]), MOST_POINTS)
    columns = {
        "token": plain(token),
        "temperature": plain(mean),
        "least": plain(least),
        "greatest": plain(greatest),
    }
    band = [_band(BLUE)] if len(token) < len(rows) else []
    return Figure(
        title="Temperature",
        caption=f"The temperature that each token was sampled at; 0 is greedy.{_grouped(rows)}",
        words=f"Temperature by token: {_told([row.temperature for row in rows])}.",
        spec=_over_tokens([*band, *_lines({"temperature": BLUE})], "temperature", len(rows)),
        columns=columns,
        by_token=True,
    )


def _reading(rows: Sequence[TokenTrace]) -> Figure:
    share = np.array([row.blocks_read / row.blocks_held for row in rows])
    token, mean, _, _ = binned(share, MOST_POINTS)
    known = [row.attention_entropy is not None for row in rows]
    columns: dict[str, Any] = {"token": plain(token), "share of blocks read": plain(mean)}
    colours = {"share of blocks read": GREEN}
    words = f"Share of the cache's blocks that were read, by token: {_told(share)}."
    caption = "Blocks of the KV cache that attention read, of those held, over all layers and KV heads."
    if any(row.kept_mass < 1 for row in rows):
        columns["attention mass kept"] = plain(binned(np.array([row.kept_mass for row in rows]), MOST_POINTS)[1])
        colours["attention mass kept"] = PURPLE
        words += f" Attention mass kept: {_told([row.kept_mass for row in rows])}."
        caption += " The mass kept is what the bound proves, or what was measured."
    spec = _over_tokens(_lines(colours), "share", len(rows))
    spec["encoding"]["y"]["scale"] = {"domain": [0, 1]}
    if any(known):
        level = [np.nan if row.attention_entropy is None else row.attention_entropy for row in rows]
        words += f" Entropy of attention, from 0 to 1: {_told(np.array(level)[known])}."
    return Figure(
        title="Blocks read",
        caption=caption + _grouped(rows),
        words=words,
        spec=spec,
        columns=columns,
        by_token=True,
    )


def _heat(rows: Sequence[TokenTrace]) -> list[Figure]:
    """What each layer and KV head read, in the mean; and each layer as the text goes on. None, if all was read."""
    shape = next((np.shape(row.reads) for row in rows if row.reads is not None), None)
    if shape is None or all(row.blocks_read == row.blocks_held for row in rows):
        return []
    layers, heads = shape
    unknown = np.full(shape, np.nan)  # of tokens of a small model, whose layers are others
    shares = np.array(
        [unknown if row.reads is None else np.array(row.reads) * unknown.size / row.blocks_held for row in rows]
    )
    mean = np.nanmean(shares, axis=0)
    layer, head = (index.ravel().tolist() for index in np.indices(mean.shape))
    by_head = Figure(
        title="Blocks read, by layer and KV head",
        caption="The share of its blocks that each KV head of each layer read, in the mean over the tokens.",
        words=f"Share of blocks read by {layers} layers of {heads} KV heads: {_told(mean.ravel())}; "
        f"most by layer {np.unravel_index(mean.argmax(), mean.shape)[0]}, "
        f"least by layer {np.unravel_index(mean.argmin(), mean.shape)[0]}.",
        spec={
            "height": max(_HEIGHT // 2, min(18 * layers, 2 * _HEIGHT)),
            "mark": {"type": "rect", "tooltip": True},
            "encoding": {
                "x": {"field": "KV head", "type": "ordinal", "axis": {"labelAngle": 0}},
                "y": {"field": "layer", "type": "ordinal"},
                "color": _shade("share of blocks read"),
            },
        },
        columns={"layer": layer, "KV head": head, "share of blocks read": plain(mean.ravel())},
    )
    moments = np.array([binned(shares[:, i].mean(axis=1), MOST_MOMENTS)[1] for i in range(layers)])
    size = -(-len(rows) // MOST_MOMENTS)
    layer_of, column_of = np.nonzero(~np.isnan(moments))
    start = column_of * size + 1
    over_time = Figure(
        title="Blocks read, as the text goes on",
        caption="The share of its blocks that each layer read, in the mean over its KV heads"
        + (f"; a column is {size} tokens." if size > 1 else "."),
        words=f"Share of blocks read by {layers} layers over {len(rows)} tokens: "
        f"{_told(moments[layer_of, column_of])}.",
        spec={
            "height": max(_HEIGHT // 2, min(18 * layers, 2 * _HEIGHT)),
            "mark": {"type": "rect", "tooltip": True},
            "encoding": {
                "x": {"field": "token", "type": "quantitative", "scale": {"nice": False}, "title": "token"},
                "x2": {"field": "to"},
                "y": {"field": "layer", "type": "ordinal"},
                "color": _shade("share of blocks read"),
            },
        },
        columns={
            "token": start.tolist(),
            "to": (start + size).tolist(),
            "layer": layer_of.tolist(),
            "share of blocks read": plain(moments[layer_of, column_of]),
        },
    )
    return [by_head, over_time]


def _progress(rows: Sequence[TokenTrace]) -> Figure:
    moved = np.cumsum([row.cost for row in rows]) / 1e6
    time = np.array([row.entropic_time for row in rows])
    step = -(-len(rows) // MOST_POINTS)
    chosen = np.unique([*range(0, len(rows), step), len(rows) - 1])
    return Figure(
        title="Entropic time against cost",
        caption="Entropy resolved so far, in nats by the clock of the run, against the bytes that this took.",
        words=f"{told(time[-1], ',.1f')} nats for {told(moved[-1], ',.1f')} MB moved, "
        f"{told(ratio(float(time[-1]), float(moved[-1])), '.3g')} nats a MB.",
        spec={
            "height": _HEIGHT,
            "mark": {"type": "line", "tooltip": True},
            "encoding": {
                "x": {"field": "cost (MB moved)", "type": "quantitative"},
                "y": {"field": "entropic time (nats)", "type": "quantitative"},
                "order": {"field": "cost (MB moved)", "type": "quantitative"},
                "color": {"value": PURPLE},
            },
        },
        columns={"cost (MB moved)": plain(moved[chosen]), "entropic time (nats)": plain(time[chosen])},
    )


def _drafts(rows: Sequence[TokenTrace]) -> Figure | None:
    """How many drafted tokens held, step by step."""
    drafted = sum(row.drafted for row in rows)
    if not drafted:
        return None
    accepted = [0]  # by step: the last token of each was sampled where a draft did not hold, or after all that did
    for row in rows[:-1]:
        if row.accepted:
            accepted[-1] += 1
        else:
            accepted.append(0)
    accepted[-1] += rows[-1].accepted
    most = max(accepted)
    steps = [accepted.count(count) for count in range(most + 1)]
    return Figure(
        title="Drafts accepted",
        caption="How many steps accepted how many drafted tokens; steps without a draft accept none.",
        words=f"{sum(accepted)} of {drafted} drafted tokens accepted in {len(accepted)} steps: "
        + ", ".join(f"{steps[count]} steps accepted {count}" for count in range(most + 1) if steps[count])
        + ".",
        spec={
            "height": _HEIGHT,
            "mark": {"type": "bar", "tooltip": True},
            "encoding": {
                "x": {"field": "accepted in a step", "type": "ordinal", "axis": {"labelAngle": 0}},
                "y": {"field": "steps", "type": "quantitative"},
                "color": {"value": GREEN},
            },
        },
        columns={"accepted in a step": list(range(most + 1)), "steps": steps},
    )


def _speakers(rows: Sequence[TokenTrace]) -> Figure | None:
    """Which of two models spoke, as stretches of tokens."""
    if all(row.by_small is None for row in rows):
        return None
    turns: list[tuple[int, int, str]] = []
    for i, row in enumerate(rows, 1):
        who = "small model" if row.by_small else "model"
        if turns and turns[-1][2] == who:
            turns[-1] = (turns[-1][0], i + 1, who)
        else:
            turns.append((i, i + 1, who))
    small = sum(row.by_small is True for row in rows)
    return Figure(
        title="Which model spoke",
        caption="Which of the two models said each token.",
        words=f"The small model said {small} of {len(rows)} tokens, in {len(turns)} turns of the two.",
        spec={
            "height": 70,
            "mark": {"type": "rect", "tooltip": True},
            "encoding": {
                "x": {
                    "field": "from",
                    "type": "quantitative",
                    "scale": {"domain": [1, len(rows) + 1], "nice": False},
                    "title": "token",
                },
                "x2": {"field": "to"},
                "y": {"field": "said by", "type": "nominal", "title": None},
                "color": {
                    "field": "said by",
                    "type": "nominal",
                    "scale": {"domain": ["model", "small model"], "range": [GREEN, PURPLE]},
                    "legend": None,
                },
            },
        },
        columns={
            "from": [turn[0] for turn in turns],
            "to": [turn[1] for turn in turns],
            "said by": [turn[2] for turn in turns],
        },
    )


def _guards(rows: Sequence[TokenTrace]) -> Figure | None:
    names = sorted({name for row in rows for name in row.guard_rates})
    names = [name for name in names if any(row.guard_rates.get(name, 0) > 0 for row in rows)]
    if not names:
        return None
    columns: dict[str, list[Any]] = {"token": [], "share of tokens flagged": [], "guard": []}
    for name in names:
        token, mean, _, _ = binned(np.array([row.guard_rates.get(name, np.nan) for row in rows]), MOST_POINTS)
        columns["token"] += plain(token)
        columns["share of tokens flagged"] += plain(mean)
        columns["guard"] += [name.replace("_", " ")] * len(token)
    line = {
        "mark": "line",
        "encoding": {
            "y": {"field": "share of tokens flagged"},
            "color": {
                "field": "guard",
                "type": "nominal",
                "scale": {"range": [WARM, BLUE, GREEN, PURPLE]},
                "legend": _LEGEND,
            },
        },
    }
    spec = _over_tokens([line], "share of tokens so far", len(rows))
    spec["encoding"]["y"]["scale"] = {"domain": [0, 1]}
    last = {name: f"{told(100 * rate, '.0f')}%" for name, rate in rows[-1].guard_rates.items()}
    return Figure(
        title="Guards",
        caption="The share of the tokens so far that each guard flagged.",
        words="; ".join(f"{name.replace('_', ' ')} {last.get(name, 'unknown')} of tokens" for name in names) + ".",
        spec=spec,
        columns=columns,
        by_token=True,
    )


def _over_tokens(layers: list[dict[str, Any]], title: str, tokens: int) -> dict[str, Any]:
    """A drawing of layers over tokens, with a rule at the token that is looked at: the signal `at`."""
    x = {"field": "token", "type": "quantitative", "title": "token"}
    rule = {
        "mark": {"type": "rule", "strokeDash": [3, 3], "opacity": 0.8},
        "data": {"values": [{}]},
        "encoding": {"x": {"datum": {"expr": "at"}}},
    }
    return {
        "height": _HEIGHT,
        "params": [{"name": "at", "value": 1}],
        "encoding": {
            "x": x | {"scale": {"domain": [1, max(tokens, 2)], "nice": False}},
            "y": {"type": "quantitative", "title": title},
        },
        "layer": [*layers, rule],
    }


def _lines(colours: Mapping[str, str], points: Sequence[str] = ()) -> list[dict[str, Any]]:
    """A line for each column in its colour, dots for those of `points`, with one legend for all."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    legend = _LEGEND if len(colours) > 1 else None
    dots = {"type": "point", "filled": True, "size": 14, "opacity": 0.7, "clip": True}
    return [
        {
            "mark": dots if name in points else {"type": "line", "clip": True, "strokeWidth": 1.5},
            "encoding": {"y": {"field": name}, "color": {"datum": name, "scale": scale, "legend": legend}},
        }
        for name in colours
    ]


def _band(colour: str) -> dict[str, Any]:
    return {
        "mark": {"type": "area", "opacity": 0.25, "clip": True, "color": colour},
        "encoding": {"y": {"field": "least"}, "y2": {"field": "greatest"}},
    }


def _shade(field: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "scale": {"domain": [0, 1], "scheme": "$heat"}, "title": "share"}


def _grouped(rows: Sequence[TokenTrace]) -> str:
    size = -(-len(rows) // MOST_POINTS)
    return "" if size == 1 else f" A point is the mean of {size} tokens, a band goes from the least to the greatest."


def _told(values: Sequence[float] | np.ndarray) -> str:
    """Return least, median and greatest of those that are known, in words."""
    there = known(values)
    if not there:
        return "unknown"
    least, middle, greatest = np.quantile(np.array(there), (0, 0.5, 1))
    return f"{least:.3g} to {greatest:.3g}, median {middle:.3g}"

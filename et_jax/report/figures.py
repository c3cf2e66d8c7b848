"""The figures of one continuation, from the measurements of its tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from et_jax.io.known import formatted, known, ratio
from et_jax.report.drawing import (
    BLUE,
    GREEN,
    GREY,
    HEIGHT,
    LEGEND,
    MOST_POINTS,
    PURPLE,
    WARM,
    Figure,
    axis,
    band,
    binned,
    chart,
    groups,
    lines,
    over_tokens,
    plain,
    shade,
)
from et_jax.serve.completions import Completion, TokenTrace

MOST_MOMENTS = 120  # columns of a heat map over tokens


def of_completion(completion: Completion) -> list[Figure]:
    """Return the figures of one continuation, without empty ones."""
    rows = completion.trace
    found = [_entropy(rows), _temperature(rows), _reading(rows), *_heat(rows), _progress(rows)]
    return [figure for figure in [*found, _drafts(rows), _speakers(rows), _guards(rows)] if figure is not None]


def _entropy(rows: Sequence[TokenTrace]) -> Figure:
    token, mean, least, greatest = binned(np.array([row.entropy for row in rows]), MOST_POINTS)
    surprisal = binned(np.array([row.surprisal for row in rows]), MOST_POINTS)[1]
    columns = {"token": plain(token), "entropy": plain(mean), "least": plain(least), "greatest": plain(greatest)}
    columns["surprisal"] = plain(surprisal)
    drawn = lines({"surprisal": GREY, "entropy": WARM}, points=["surprisal"])
    area = [band(WARM)] if len(token) < len(rows) else []
    return Figure(
        title="Entropy and surprisal",
        caption=f"Entropy of the next token, and the surprisal of the one that was taken, in nats.{_grouped(rows)}",
        words=f"Entropy by token: {_described([row.entropy for row in rows])} nats. "
        f"Surprisal: {_described([row.surprisal for row in rows])} nats.",
        spec=over_tokens([*area, *drawn], "nats", len(rows)),
        columns=columns,
        by_token=True,
    )


def _temperature(rows: Sequence[TokenTrace]) -> Figure:
    token, mean, least, greatest = binned(np.array([row.temperature for row in rows]), MOST_POINTS)
    columns = {"token": plain(token), "temperature": plain(mean), "least": plain(least), "greatest": plain(greatest)}
    area = [band(BLUE)] if len(token) < len(rows) else []
    return Figure(
        title="Temperature",
        caption=f"The temperature that each token was sampled at; 0 is greedy.{_grouped(rows)}",
        words=f"Temperature by token: {_described([row.temperature for row in rows])}.",
        spec=over_tokens([*area, *lines({"temperature": BLUE})], "temperature", len(rows)),
        columns=columns,
        by_token=True,
    )


def _reading(rows: Sequence[TokenTrace]) -> Figure:
    share = np.array([row.blocks_read / row.blocks_held for row in rows])
    token, mean, _, _ = binned(share, MOST_POINTS)
    known = [row.attention_entropy is not None for row in rows]
    columns: dict[str, Any] = {"token": plain(token), "share of blocks read": plain(mean)}
    colours = {"share of blocks read": GREEN}
    words = f"Share of the cache's blocks that were read, by token: {_described(share)}."
    caption = "Blocks of the KV cache that attention read, of all cached blocks, over all layers and KV heads."
    kept = np.array([row.kept_mass for row in rows], float)
    if np.any(kept < 1):
        columns["attention mass kept"] = plain(binned(kept, MOST_POINTS)[1])
        colours["attention mass kept"] = PURPLE
        words += f" Attention mass kept: {_described(kept)}."
        caption += " The mass kept is the proved bound, or an estimate; tokens that select no blocks have none."
    spec = over_tokens(lines(colours), "share", len(rows))
    spec["encoding"]["y"]["scale"] = {"domain": [0, 1]}
    if any(known):
        level = [np.nan if row.attention_entropy is None else row.attention_entropy for row in rows]
        words += f" Entropy of attention, from 0 to 1: {_described(np.array(level)[known])}."
    caption += _grouped(rows)
    return Figure(title="Blocks read", caption=caption, words=words, spec=spec, columns=columns, by_token=True)


def _heat(rows: Sequence[TokenTrace]) -> list[Figure]:
    """Return the mean reads of each layer and KV head, and each layer's over time. Empty if everything was read."""
    shape = next((np.shape(row.reads) for row in rows if row.reads is not None), None)
    if shape is None or all(row.blocks_read == row.blocks_held for row in rows):
        return []
    layers, heads = shape
    unknown = np.full(shape, np.nan)  # for tokens of a small model, which has other layers
    shares = np.array(
        [unknown if row.reads is None else np.array(row.reads) * unknown.size / row.blocks_held for row in rows]
    )
    mean = np.nanmean(shares, axis=0)
    layer, head = (index.ravel().tolist() for index in np.indices(mean.shape))
    height = max(HEIGHT // 2, min(18 * layers, 2 * HEIGHT))
    by_head = Figure(
        title="Blocks read, by layer and KV head",
        caption="The share of its blocks that each KV head of each layer read, in the mean over the tokens.",
        words=f"Share of blocks read by {layers} layers of {heads} KV heads: {_described(mean.ravel())}; "
        f"most by layer {np.unravel_index(mean.argmax(), mean.shape)[0]}, "
        f"least by layer {np.unravel_index(mean.argmin(), mean.shape)[0]}.",
        spec=chart(
            "rect", height, x=groups("KV head"), y=axis("layer", "ordinal"), color=shade("share of blocks read")
        ),
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
        f"{_described(moments[layer_of, column_of])}.",
        spec=chart(
            "rect",
            height,
            x=axis("token", scale={"nice": False}, title="token"),
            x2={"field": "to"},
            y=axis("layer", "ordinal"),
            color=shade("share of blocks read"),
        ),
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
    shown_points = np.unique([*range(0, len(rows), step), len(rows) - 1])
    return Figure(
        title="Entropic time against cost",
        caption="Entropy resolved so far, in nats by the clock of the run, against the bytes that this took.",
        words=f"{formatted(time[-1], ',.1f')} nats for {formatted(moved[-1], ',.1f')} MB moved, "
        f"{formatted(ratio(float(time[-1]), float(moved[-1])), '.3g')} nats a MB.",
        spec=chart(
            "line",
            x=axis("cost (MB moved)"),
            y=axis("entropic time (nats)"),
            order=axis("cost (MB moved)"),
            color={"value": PURPLE},
        ),
        columns={"cost (MB moved)": plain(moved[shown_points]), "entropic time (nats)": plain(time[shown_points])},
    )


def _drafts(rows: Sequence[TokenTrace]) -> Figure | None:
    """Return the accepted drafted tokens, step by step."""
    drafted = sum(row.drafted for row in rows)
    if not drafted:
        return None
    accepted = [0]  # by step: its last token was sampled after a rejected draft, or after all accepted ones
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
        spec=chart("bar", x=groups("accepted in a step"), y=axis("steps"), color={"value": GREEN}),
        columns={"accepted in a step": list(range(most + 1)), "steps": steps},
    )


def _speakers(rows: Sequence[TokenTrace]) -> Figure | None:
    """Return which of two models produced each token, as stretches of tokens."""
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
    starts, ends, speakers = zip(*turns, strict=True)
    scale = {"domain": ["model", "small model"], "range": [GREEN, PURPLE]}
    return Figure(
        title="Active model",
        caption="Which of the two models produced each token.",
        words=f"The small model produced {small} of {len(rows)} tokens, in {len(turns)} turns of the two.",
        spec=chart(
            "rect",
            70,
            x=axis("from", scale={"domain": [1, len(rows) + 1], "nice": False}, title="token"),
            x2={"field": "to"},
            y=axis("said by", "nominal", title=None),
            color=axis("said by", "nominal", scale=scale, legend=None),
        ),
        columns={"from": list(starts), "to": list(ends), "said by": list(speakers)},
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
    colour = axis("guard", "nominal", scale={"range": [WARM, BLUE, GREEN, PURPLE]}, legend=LEGEND)
    line = {"mark": "line", "encoding": {"y": {"field": "share of tokens flagged"}, "color": colour}}
    spec = over_tokens([line], "share of tokens so far", len(rows))
    spec["encoding"]["y"]["scale"] = {"domain": [0, 1]}
    last = {name: f"{formatted(100 * rate, '.0f')}%" for name, rate in rows[-1].guard_rates.items()}
    return Figure(
        title="Guards",
        caption="The share of the tokens so far that each guard flagged.",
        words="; ".join(f"{name.replace('_', ' ')} {last.get(name, 'unknown')} of tokens" for name in names) + ".",
        spec=spec,
        columns=columns,
        by_token=True,
    )


def _grouped(rows: Sequence[TokenTrace]) -> str:
    size = -(-len(rows) // MOST_POINTS)
    return "" if size == 1 else f" A point is the mean of {size} tokens, a band goes from the least to the greatest."


def _described(values: Sequence[float] | np.ndarray) -> str:
    """Return the least, median and greatest known value, in words."""
    there = known(values)
    if not there:
        return "unknown"
    least, middle, greatest = np.quantile(np.array(there), (0, 0.5, 1))
    return f"{least:.3g} to {greatest:.3g}, median {middle:.3g}"

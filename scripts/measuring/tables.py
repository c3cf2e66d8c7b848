"""What rows amount to, the table or the picture of a run, and the parts of the documents that show them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.io.files import replace_file, replace_picture
from scripts.measuring import paired
from scripts.measuring.experiment import Experiment
from scripts.measuring.results import REPOSITORY, table

DOCS = REPOSITORY / "docs"
DOCUMENT = DOCS / "evidence.md"  # that shows the tables


def summary(
    experiment: Experiment, rows: Mapping[str, Any], baseline: Mapping[str, Any] | None, timed: bool
) -> dict[str, Any]:
    """Return of every figure its value with an interval, and how it compares with the baseline's on the same rows.

    Of quality that is the mean, with the interval that contains it with 95%, resampled row by row; of time the median,
    with the least and the greatest round.
    """
    found = {}
    for name in experiment.figures:
        if name not in rows:
            continue
        own = np.asarray(rows[name])
        made = found[name] = {"value": float(np.median(own) if timed else own.mean())}
        if own.ndim == 0:
            continue
        low, high = (own.min(), own.max()) if timed else paired.interval(own)
        made |= {"low": float(low), "high": float(high)}
        if baseline is not None and name in baseline:
            made |= _against(experiment.figures[name].against, own, np.asarray(baseline[name]))
    return found


def _against(kind: str | None, own: np.ndarray, other: np.ndarray) -> dict[str, Any]:
    if kind is None:
        return {}
    if own.shape != other.shape:
        raise ValueError(f"An arm has {len(own)} rows and its baseline {len(other)}; both need the same rows.")
    if kind == "difference":
        low, high = paired.interval(own - other)
        return {"difference": {"value": float((own - other).mean()), "low": low, "high": high}}
    if kind == "saving":
        return {"saving": paired.saving(own, other)}
    ratio = own / other
    return {"ratio": {"value": float(np.median(ratio)), "low": float(ratio.min()), "high": float(ratio.max())}}


def shown(experiment: Experiment, run: Mapping[str, Any]) -> str:
    """Return the Markdown table of a run: a line for each arm, a column for each figure and comparison."""
    labels = list(dict.fromkeys(name for group in run["groups"] for name in group["labels"]))
    each = [arm for group in run["groups"] for arm in group["arms"].values()]
    present = [name for name in experiment.figures if any(name in arm.get("figures", ()) for arm in each)]
    header, lines = [*labels, "arm"], []
    for name in present:
        figure = experiment.figures[name]
        header += [figure.header] if figure.against is None else [figure.header, _OVER[figure.against]]
    for group in run["groups"]:
        for arm, found in group["arms"].items():
            line = [*(group["labels"].get(one) for one in labels), arm]
            if "missed" in found:
                lines.append([*line, found["missed"], *[None] * (len(header) - len(line) - 1)])
                continue
            for name in present:
                figure = found["figures"].get(name, {})
                line.append(_interval(figure))
                if against := experiment.figures[name].against:
                    line.append(_compared(against, figure.get(against)))
            lines.append(line)
    return table(header, lines)


_OVER = {"difference": "over the baseline", "saving": "saved of the baseline's", "ratio": "times the baseline's"}


def _interval(figure: Mapping[str, Any]) -> str | None:
    if not figure:
        return None
    return _ranged(figure, "value", ".3g") if "low" in figure else f"{figure['value']:.3g}"


def _ranged(found: Mapping[str, float], value: str, form: str) -> str:
    """Return a value with its interval, alone where both look alike."""
    shown, low, high = (f"{found[name]:{form}}" for name in (value, "low", "high"))
    return shown if low == high == shown else f"{shown} ({low} to {high})"


def _compared(kind: str, found: Mapping[str, Any] | None) -> str | None:
    if found is None:
        return None
    if kind == "saving":
        return _ranged(found, "share", "+.0%")
    return _ranged(found, "value", "+.3g" if kind == "difference" else ".3g")


def origin(name: str, run: Mapping[str, Any]) -> str:
    """Return the line that says where figures come from."""
    place = run["machine"]
    words = {key: " ".join(map(str, one)) if isinstance(one, list) else one for key, one in run["settings"].items()}
    settings = ", ".join(f"{key} {one}" for key, one in words.items())
    cpu = f"{place['processor']}, {place['cores']} cores"
    where = cpu if place["device"] == "cpu" else place["device"]
    return f"`python -m scripts.measure {name}` on {where}, jax {place['jax']} ({settings})."


def part(name: str, experiment: Experiment, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of runs."""
    return "\n\n".join(f"{origin(name, run)}\n\n{shown(experiment, run)}" for run in runs)


def illustrated(name: str, experiment: Experiment, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return what a document shows of runs: pictures, and tables of what no picture shows."""
    said = []
    for run in runs:
        said.append(origin(name, run))
        if place := picture(name, experiment, run):
            said.append(f"![{experiment.question}]({place})")
        if listed := [group for group in run["groups"] if not is_drawn(experiment, group)]:
            said.append(shown(experiment, {**run, "groups": listed}))
    return "\n\n".join(said)


def picture(name: str, experiment: Experiment, run: Mapping[str, Any]) -> str | None:
    """Return the file in docs/ of a run's picture, None where it has none."""
    if not any(is_drawn(experiment, group) for group in run["groups"]):
        return None
    of = "-".join(Path(str(run["settings"][one])).name for one in ("model", "length") if one in run["settings"])
    return f"figures/{name}-{of}.png"


def is_drawn(experiment: Experiment, group: Mapping[str, Any]) -> bool:
    """Return whether a group has both figures of the experiment's plot, so that a picture shows it."""
    return experiment.plot is not None and all(
        set(experiment.plot) <= arm.get("figures", {}).keys() for arm in group["arms"].values()
    )


def draw(experiment: Experiment, run: Mapping[str, Any], path: Path) -> None:
    """Draw the groups of a run that are drawn: a line for each kind of arm, which is named by kind, space and setting.

    The vertical axis is logarithmic.
    """
    from matplotlib.figure import Figure

    assert experiment.plot is not None
    x, y = experiment.plot
    curves: dict[str, list[tuple[float, float]]] = {}
    for group in run["groups"]:
        for name, arm in group["arms"].items() if is_drawn(experiment, group) else ():
            at = arm["figures"][x]["value"], arm["figures"][y]["value"]
            if at[1] > 0:  # what the others are compared with is 0 everywhere
                curves.setdefault(name.rpartition(" ")[0], []).append(at)
    figure = Figure(figsize=(7, 4.5), layout="tight")
    axis = figure.add_subplot()
    for (name, points), marker in zip(curves.items(), "osv^<>DPX*hd" * 4, strict=False):
        axis.plot(*zip(*sorted(points), strict=True), marker=marker, markersize=5, label=name)
    axis.set(xlabel=experiment.figures[x].header, ylabel=experiment.figures[y].header, yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    replace_picture(path, figure)


def insert(document: Path, name: str, text: str) -> None:
    """Replace the part of a document between `<!-- NAME: begin -->` and `<!-- NAME: end -->`.

    Raises ValueError where the document has no such part.
    """
    found = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    before = document.read_text(encoding="utf-8")
    if not found.search(before):
        raise ValueError(f"{document} has no part between <!-- {name}: begin --> and <!-- {name}: end -->")
    replace_file(document, found.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", before))

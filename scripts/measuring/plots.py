"""Curves of an experiment whose arms run at several settings: one figure over another, with a line for each arm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from et_jax.io.files import replace_picture
from scripts.measuring.experiment import Experiment


def is_drawn(experiment: Experiment, group: Mapping[str, Any]) -> bool:
    """Return whether a group has both figures of the experiment's plot, so that a picture shows it."""
    return experiment.plot is not None and all(
        set(experiment.plot) <= arm.get("figures", {}).keys() for arm in group["arms"].values()
    )


def draw(experiment: Experiment, run: Mapping[str, Any], path: Path) -> None:
    """Draw the groups of a run that are drawn. An arm is named by its kind, a space and its setting.

    The vertical axis is logarithmic.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    assert experiment.plot is not None
    x, y = experiment.plot
    curves: dict[str, list[tuple[float, float]]] = {}
    for group in run["groups"]:
        for name, arm in group["arms"].items() if is_drawn(experiment, group) else ():
            at = arm["figures"][x]["value"], arm["figures"][y]["value"]
            if at[1] > 0:  # what the others are compared with is 0 everywhere
                curves.setdefault(name.rpartition(" ")[0], []).append(at)
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="tight")
    for (name, points), marker in zip(curves.items(), "osv^<>DPX*hd" * 4, strict=False):
        axis.plot(*zip(*sorted(points), strict=True), marker=marker, markersize=5, label=name)
    headers = (experiment.figures[one].header for one in experiment.plot)
    axis.set(xlabel=next(headers), ylabel=next(headers), yscale="log")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    replace_picture(path, figure)
    plt.close(figure)

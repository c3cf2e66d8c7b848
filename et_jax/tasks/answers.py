"""A model's answers to questions, the shares of the cache that it read for them, and their presentation."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from et_jax.io import html
from et_jax.io.files import replace_picture
from et_jax.tasks.base import Example

_SHARES = {
    "share_read": "read",
    "share_bytes": "bytes",
    "prompt_share_read": "prompt",
    "prompt_mass_kept": "mass",
    "share_held": "held",
    "share_by_model": "model",
    "share_agreed": "agreed",
}
"""Shares of an answer, and the names of their columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """A model's answer to an example.

    `length` is the requested number of tokens, or that of a file's longest example. `share_read` is the share of the
    cached blocks read, over the tokens of the answer, `share_bytes` that of their bytes, with the scored summaries.
    Of the prompt `prompt_share_read` was read, with `prompt_mass_kept` of the attention on it; of all tokens
    `share_held` were in the cache at the end. Of two models in turns the large one produced `share_by_model` of the
    answer, and `share_agreed` of one's tokens were the likeliest to the other. `entropy` (nats) and `attention_entropy`
    (from 0 to 1) are means over the answer's tokens. These are None if they were not measured, or do not apply.
    """

    example: Example
    length: int
    text: str
    right: bool
    share_read: float
    share_bytes: float | None = None
    prompt_share_read: float | None = None
    prompt_mass_kept: float | None = None
    share_held: float | None = None
    share_by_model: float | None = None
    share_agreed: float | None = None
    entropy: float | None = None
    attention_entropy: float | None = None


class Answers(list[Answer]):
    """Answers of a model, in the order of the questions; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        """Return a row per task and length: right answers, shares as in `Answer`, and the accuracy at every depth."""
        shares = [name for name in _SHARES if any(getattr(one, name) is not None for one in self)]
        depths = sorted({row["depth"] for row in summary(self)})
        rows = []
        for task, length in dict.fromkeys((one.example.task, one.length) for one in self):
            of_task = _of(self, task, length)
            at = {row["depth"]: row["accuracy"] for row in summary(of_task)}
            means = [_mean([getattr(one, name) for one in of_task]) for name in shares]
            found = f"{sum(one.right for one in of_task)} of {len(of_task)}"
            rows.append([task, length, found, *means, *(at.get(depth) for depth in depths)])
        header = ["task", "length", "right", *(_SHARES[name] for name in shares), *(f"at {one:.2f}" for one in depths)]
        return html.boxed(html.table(header, rows, "Accuracy by depth, and shares of what was read, kept or agreed."))


def summary(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return a row per task, length and depth (to a twentieth): examples, accuracy, and the shares of `Answer`.

    The shares are means over the answers that have them.
    """
    cells: dict[tuple[str, int, float], list[Answer]] = {}
    for answer in answers:
        cells.setdefault((answer.example.task, answer.length, round(answer.example.depth * 20) / 20), []).append(answer)
    return [
        {
            "task": task,
            "length": length,
            "depth": depth,
            "examples": len(cell),
            "accuracy": sum(answer.right for answer in cell) / len(cell),
            **{name: _mean([getattr(answer, name) for answer in cell]) for name in _SHARES},
        }
        for (task, length, depth), cell in cells.items()
    ]


def table(answers: Sequence[Answer]) -> str:
    """Return a line per task and length: right answers, and the accuracy at every depth."""
    rows = summary(answers)
    shares = [name for name in _SHARES if any(row[name] is not None for row in rows)]
    columns = "".join(f"{_SHARES[name]:>7}" for name in shares)
    lines = [f"{'task':<20}{'length':>7}{'right':>10}{'accuracy':>10}{columns}  accuracy by depth"]
    for task, length in dict.fromkeys((row["task"], row["length"]) for row in rows):
        here = sorted((row for row in rows if (row["task"], row["length"]) == (task, length)), key=lambda r: r["depth"])
        total = sum(row["examples"] for row in here)
        found = sum(row["accuracy"] * row["examples"] for row in here)
        shown = "".join(_percent(_mean([getattr(one, name) for one in _of(answers, task, length)])) for name in shares)
        by_depth = "  ".join(f"{row['depth']:.2f}: {row['accuracy']:.2f}" for row in here)
        lines.append(f"{task:<20}{length:>7}{f'{found:.0f}/{total}':>10}{found / total:>10.3f}{shown}  {by_depth}")
    return "\n".join(lines)


def _of(answers: Sequence[Answer], task: str, length: int) -> list[Answer]:
    return [one for one in answers if (one.example.task, one.length) == (task, length)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(share: float | None) -> str:
    return f"{'-':>7}" if share is None else f"{share:>7.0%}"


def plot(answers: Sequence[Answer], path: Path) -> None:
    """Draw a heat map of accuracy by length and depth for every task; the format follows the suffix.

    Raises UsageError if it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = summary(answers)
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, axes = plt.subplots(1, len(tasks), figsize=(1.5 + 2.6 * len(tasks), 3.6), squeeze=False, layout="tight")
    for axis, task in zip(axes[0], tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        lengths, depths = (sorted({row[name] for row in of_task}) for name in ("length", "depth"))
        cells = np.full((len(depths), len(lengths)), np.nan)
        for row in of_task:
            cells[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
        axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (y, x), value in np.ndenumerate(cells):
            axis.text(x, y, "" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", fontsize=8)
        axis.set(title=task, xlabel="length (tokens)", xticks=range(len(lengths)), yticks=range(len(depths)))
        axis.set_xticklabels(lengths)
        axis.set_yticklabels(depths)
    axes[0][0].set_ylabel("depth of the answer")
    replace_picture(path, figure)
    plt.close(figure)

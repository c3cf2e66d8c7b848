"""Draw a training run from its log: the loss, what it learned to answer, and how long its rows were.

python scripts/plot_training.py runs/long/log.jsonl docs/figures/training.png
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.files import replace_picture
from et_jax.report.plot import check_picture
from scripts.measuring.results import pyplot


def records(log: Path) -> list[dict[str, Any]]:
    """Return the records of a log by step; where a resumed run did a step again, the later one counts."""
    try:
        found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{log} cannot be read ({error}); name the log.jsonl of a run's folder.") from error
    by_step = {record["step"]: record for record in found}
    return [by_step[step] for step in sorted(by_step)]


def curves(log: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of every figure that evaluations logged: held-out losses and accuracies."""
    names = dict.fromkeys(name for record in log for name in record if name.startswith(("held_out", "accuracy")))
    return {name: ([r["step"] for r in log if name in r], [r[name] for r in log if name in r]) for name in names}


def draw(log: list[dict[str, Any]], path: Path) -> None:
    """Draw held-out loss over accuracy by task, with the tokens per row above."""
    figure, (losses, tasks) = pyplot().subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    for name, (steps, values) in curves(log).items():
        if name.startswith("accuracy/"):
            tasks.plot(steps, values, marker=".", label=name.removeprefix("accuracy/"))
        elif name == "held_out_per_token":
            losses.plot(steps, values, marker=".", color="tab:red", label="held-out text")
    losses.plot([r["step"] for r in log], [r["loss"] for r in log], color="tab:grey", alpha=0.5, label="trained on")
    before = None
    for record in log:
        if record["length"] != before:
            for axis in (losses, tasks):
                axis.axvline(record["step"], color="lightgrey", zorder=0)
            losses.annotate(f"{record['length']}", (record["step"], losses.get_ylim()[1]), fontsize=8, va="bottom")
            before = record["length"]
    losses.set(ylabel="nats per token, as weighed")
    losses.set_title("tokens per row, from left", fontsize=8, loc="right", pad=14)
    tasks.set(xlabel="step", ylabel="right answers", ylim=(-0.03, 1.03))
    for axis in (losses, tasks):
        axis.legend(fontsize=8, ncols=2)
    replace_picture(path, figure, dpi=110)


def main() -> None:
    """Parse the arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="log.jsonl of a run's folder")
    parser.add_argument("picture", type=Path, help=".png, .svg or .pdf")
    args = parser.parse_args()
    try:
        check_picture(str(args.picture))
        draw(records(args.log), args.picture)
    except UsageError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

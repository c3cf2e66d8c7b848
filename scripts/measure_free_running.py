"""At how few blocks is a task still answered as well as with all? Tolerances of three kinds at equal blocks read.

    python scripts/measure_free_running.py

Every task is asked at `--length` tokens of the model alone, its own tokens fed back to it, once reading everything and
then at each share of blocks by "constant" (one proved tolerance for all heads), "attention entropy" (the `certified`
preset) and "expected error" (`adaptive`), with the presets' sinks and window. A tolerance is searched, task by task,
until the answers' tokens read the wanted share of blocks to within `--within` of it. Each answer is compared with
dense's to the same question: `p` is the chance of so many losses against gains by a fair coin.
"""

import argparse
from typing import Any

import numpy as np

from et_jax.control import select
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.evidence import tables
from et_jax.serve.engine import Model, load
from et_jax.tasks.answers import Answer
from et_jax.tasks.asking import counter, evaluate, grid
from et_jax.tasks.base import Example
from et_jax.tasks.generators import TASKS
from et_jax.types import replace
from scripts.measuring import arguments, paired
from scripts.measuring.arguments import DEPTHS
from scripts.measuring.results import write

SHARES = (0.36, 0.25, 0.15, 0.08)
LEAST, MOST = 1e-9, 1e6  # tolerances that are tried; no share of mass is above 1
STARTS = {"constant": 0.1, "attention entropy": 0.1, "expected error": 1e-6}


def controls(tolerance: float) -> dict[str, Controller]:
    """Return what is compared, by name."""
    certified = preset("certified", tolerance=min(tolerance, 1.0))
    assert isinstance(certified.selector, select.Guarded)
    plain = replace(certified.selector, selector=select.Certified(select.coded_bounds))
    return {
        "constant": replace(certified, selector=plain),
        "attention entropy": certified,
        "expected error": preset("adaptive", tolerance=tolerance),
    }


def answered(
    model: Model, asked: list[tuple[int, Example]], name: str, share: float, within: float, start: float
) -> tuple[float, list[Answer]]:
    """Return the tolerance at which a kind reads this share of blocks, searched from `start` on, and the answers."""

    def spend(tolerance: float, asked: list[tuple[int, Example]]) -> tuple[float, list[Answer]]:
        answers = evaluate(model, asked, control=controls(tolerance)[name])
        return float(np.mean([answer.share_read for answer in answers])), answers

    few = asked[::5]
    about, _ = paired.matched(lambda t: spend(t, few), share, LEAST, MOST, within=2 * within, start=start)
    return paired.matched(lambda t: spend(t, asked), share, LEAST, MOST, within=within, start=about)


def measure(model: Model, task: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return right answers of one task: all blocks read, and by kind of tolerance and share of blocks."""
    asked = grid(counter(model), [task], [args.length], depths=DEPTHS, samples=args.samples, seed=args.seed)
    dense = [answer.right for answer in evaluate(model, asked, control="off")]
    lines = []
    for name, tolerance in STARTS.items():
        for share in SHARES:
            line: dict[str, Any] = {"tolerance_by": name, "share": share}
            try:
                tolerance, answers = answered(model, asked, name, share, args.within, tolerance)
            except ValueError as error:
                lines.append(line | {"missed": str(error)})
            else:
                right = [answer.right for answer in answers]
                read = float(np.mean([answer.share_read for answer in answers]))
                line |= {"tolerance": tolerance, "share_read": read, "right": sum(right)}
                lines.append(line | {"p": paired.p_of_losses(dense, right)})
            print(task, sum(dense), *lines[-1].values(), flush=True)
    return {"task": task, "questions": len(asked), "dense": sum(dense), "arms": lines}


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    parser = arguments.parser(__doc__, "model", "samples", "seed", results="free_running.json")
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="repeatable (default: all)")
    parser.add_argument("--length", type=arguments.count(), default=2048)
    parser.add_argument("--within", type=float, default=0.03, help="of the wanted share, over it (default 0.03)")
    parser.add_argument(
        "--num-pages", type=arguments.count(), default=8000, help="enough to keep the prompts of a task"
    )
    args = parser.parse_args()
    with arguments.refusals("measure_free_running"):
        model = load(args.model, num_pages=args.num_pages)
        tasks = [measure(model, task, args) for task in args.task or TASKS]
    print(tables.free_running(tasks))
    settings = {name: getattr(args, name) for name in ("model", "length", "samples", "seed", "within")}
    write(args.output, "scripts/measure_free_running.py", settings, tasks=tasks)


if __name__ == "__main__":
    main()

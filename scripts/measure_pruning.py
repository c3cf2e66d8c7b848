"""Whether pruning by E_b > theta keeps the answers, and what it must know of attention to do so.

    python scripts/measure_pruning.py [--length 512 --length 1024 --length 2048]

Every task is asked of the model under each way of pruning (Entropic-Time Inference, section 3.2): presets `paper` and
`guarded`, whose threshold follows the entropy of the last token, with alpha of each kind that there is, and one
constant threshold in its place. Printed are right answers, the share of blocks read, and of bytes: with summaries,
codes and masses that were looked at to choose. `p` is the chance of so many losses against gains, next to reading
everything, by a fair coin. What entropy adds over a constant threshold, and over its own shuffle, is measured on text,
at equal reading, by `measure_selection.py`.
"""

import itertools
import sys
from typing import Any

import numpy as np

from et_jax.control import clock, priority, select, tolerance, view
from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.evidence import tables
from et_jax.serve.engine import Model, load
from et_jax.tasks.answers import Answer
from et_jax.tasks.asking import counter, evaluate, grid
from et_jax.tasks.generators import TASKS
from et_jax.types import replace
from scripts.measuring import arguments, paired
from scripts.measuring.arguments import DEPTHS
from scripts.measuring.results import write

PARTS = ("boxes", "last masses")  # of the alpha that presets take
THETA = 0.05  # the presets' own, where the model is certain
ALPHAS = {
    "mean keys": view.mass,
    "8-bit keys": view.coded_mass,
    "boxes": view.box_mass,
    "last masses": view.last_mass,
    "the greater of last masses and boxes": view.greater_mass,
}


def pruned(name: str, alpha: select.Alpha) -> Controller:
    """Return a preset with another alpha."""
    controller = preset(name)
    assert isinstance(controller.selector, select.Guarded)
    active = controller.selector.selector
    assert isinstance(active, select.ActiveSet)
    looks = active.look_every if "masses" in view.needs_of(alpha) else None
    return replace(
        controller, selector=replace(controller.selector, selector=replace(active, alpha=alpha, look_every=looks))
    )


def controls() -> dict[str, Controller]:
    """Return what is compared, by name."""
    found = {f"paper, {by}": pruned("paper", alpha) for by, alpha in ALPHAS.items()}
    found |= {f"guarded, {by}": pruned("guarded", alpha) for by, alpha in ALPHAS.items() if by not in PARTS}
    constant = chain(clock.FallClock(), priority.EntropyDrift(), tolerance.Constant(THETA))
    kept = ("8-bit keys", "the greater of last masses and boxes")
    return found | {f"constant, {by}": replace(pruned("paper", ALPHAS[by]), law=constant) for by in kept}


def measure(model: Model, tasks: list[str], length: int, samples: int, seed: int) -> list[dict[str, Any]]:
    """Return right answers at one length, of every task by way of pruning."""
    count = counter(model)
    asked = {task: grid(count, [task], [length], depths=DEPTHS, samples=samples, seed=seed) for task in tasks}

    def answered(control: Controller | str) -> dict[str, list[Answer]]:
        each = iter(evaluate(model, [one for task in tasks for one in asked[task]], control=control))
        return {task: list(itertools.islice(each, len(asked[task]))) for task in tasks}

    dense = {task: [answer.right for answer in answers] for task, answers in answered("off").items()}
    cases = [
        {"task": task, "length": length, "questions": len(asked[task]), "dense": sum(dense[task]), "arms": []}
        for task in tasks
    ]
    for name, controller in controls().items():
        found = answered(controller)
        for case in cases:
            answers, own = found[case["task"]], dense[case["task"]]
            right = [answer.right for answer in answers]
            line = {
                "arm": name,
                "right": sum(right),
                "share_read": float(np.mean([answer.share_read for answer in answers])),
                "share_bytes": float(np.mean([answer.share_bytes or 0.0 for answer in answers])),
                "p": paired.p_of_losses(own, right),
            }
            case["arms"].append(line)
            print(case["task"], length, case["dense"], *line.values(), file=sys.stderr, flush=True)
    return cases


def main() -> None:
    parser = arguments.parser(__doc__, "model", "samples", "seed", results="pruning.json")
    parser.add_argument("--task", action="append", choices=sorted(TASKS), help="repeatable (default: all)")
    parser.add_argument(
        "--length", action="append", type=arguments.count(), help="repeatable (default 512, 1024, 2048)"
    )
    args = parser.parse_args()
    lengths = args.length or [512, 1024, 2048]
    with arguments.refusals("measure_pruning"):
        model = load(args.model)
        tasks = args.task or list(TASKS)
        cases = [case for n in lengths for case in measure(model, tasks, n, args.samples, args.seed)]
    print(tables.pruning(cases))
    settings = {"model": args.model, "lengths": lengths, "samples": args.samples, "seed": args.seed, "theta": THETA}
    write(args.output, "scripts/measure_pruning.py", settings, cases=cases)


if __name__ == "__main__":
    main()

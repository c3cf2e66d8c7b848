"""Does an answer come from the blocks that hold it? Accuracy with these blocks open, closed, and others closed instead.

    python scripts/measure_reading.py --task single_key --length 512

At every depth the blocks between the first and the last needle of the examples are closed by hand. Closed instead are
as many blocks as far from the other end. The question is prefilled with all open, so what is measured is its last token
and the answer's own: the tokens at which the answer is looked up.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Array, Bool

from et_jax.control import select
from et_jax.control.controller import Controller
from et_jax.control.view import BlockView
from et_jax.errors import UsageError
from et_jax.io.texts import read_text
from et_jax.serve.engine import Model, load
from et_jax.tasks.asking import counter, evaluate
from et_jax.tasks.base import Example, sentences
from et_jax.tasks.generators import example
from et_jax.types import Count, value
from scripts.measuring import arguments
from scripts.measuring.results import RESULTS, table, write

TASKS = ("single_key", "multi_key", "passkey", "line_retrieval")  # whose needle is the question with its answer
DEPTHS = (0.2, 0.4, 0.6, 0.8)
_ENDS = '.!?"\u201d\u2019'  # of a sentence
WINDOW = 64  # tokens that sinks_window reads besides four sinks


@value
class Closed:
    """A mask that opens all but the blocks with a token from `begin` on and before `end`."""

    begin: Count
    end: Count

    def __call__(self, view: BlockView) -> Bool[Array, " n"]:
        return (view.start + view.num_tokens <= self.begin) | (view.start >= self.end)


def span(model: Model, example: Example) -> tuple[int, int]:
    """Return the positions of the needle's first token and behind its last."""
    prompt, answer = example.prompt, f"{example.answer}."
    start = len(prompt)
    while prompt[start - 1] not in _ENDS and prompt[start - 1 :] + answer in prompt:  # so far the question goes
        start -= 1
    needle = prompt[start:] + answer
    begin = prompt.index(needle)
    end = begin + len(needle)
    count, opening = counter(model), len(model.tokenizer.encode(""))
    return opening + count(prompt[:begin]), opening + count(prompt[:end])


def measure(
    model: Model, task: str, length: int, samples: int, seed: int, haystack: list[str] | None
) -> dict[str, dict[str, float]]:
    """Return the share of right answers by what is open, in all and at every depth."""
    found: dict[str, dict[str, float]] = {}
    for index, depth in enumerate(DEPTHS):
        first = (seed * len(DEPTHS) + index) * samples
        made = partial(example, task, count=counter(model), length=length, depth=depth, haystack=haystack)
        asked = [(length, made(seed=first + sample)) for sample in range(samples)]
        spans = [span(model, one) for _, one in asked]
        begin, end = min(first for first, _ in spans), max(last for _, last in spans)
        ways = {
            "all open": select.Dense(),
            "the needle's blocks closed": Closed(begin, end),
            "as many others closed": Closed(length - end, length - begin),
            f"4 sinks and the last {WINDOW} tokens open": select.SinksWindow(4, WINDOW),
        }
        for way, selector in ways.items():
            answers = evaluate(model, asked, control=Controller(selector=selector))
            found.setdefault(way, {})[str(depth)] = float(np.mean([answer.right for answer in answers]))
    return {way: {"all": float(np.mean(list(by_depth.values())))} | by_depth for way, by_depth in found.items()}


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    parser = arguments.parser(__doc__, "model", "seed")
    parser.add_argument("--task", action="append", choices=TASKS, help="repeatable (default single_key and passkey)")
    parser.add_argument("--length", type=arguments.count(), default=512)
    parser.add_argument("--samples", type=arguments.count(), default=8, help="examples at each depth")
    parser.add_argument("--haystack", type=Path, help="a text to hide answers in (default: invented sentences)")
    args = parser.parse_args()
    try:
        model = load(args.model)
        haystack = sentences(read_text(args.haystack, "The haystack")) if args.haystack else None
        results = {
            task: measure(model, task, args.length, args.samples, args.seed, haystack)
            for task in args.task or ["single_key", "passkey"]
        }
    except (UsageError, OSError) as error:
        sys.exit(str(error))
    for task, ways in results.items():
        rows = [[way, *by_depth.values()] for way, by_depth in ways.items()]
        print(task, table(["open", "all", *(f"depth {depth}" for depth in DEPTHS)], rows), sep="\n\n")
    settings = {"model": args.model, "length": args.length, "samples": args.samples, "seed": args.seed}
    write(RESULTS / "reading.json", "scripts/measure_reading.py", settings, tasks=results)


if __name__ == "__main__":
    main()

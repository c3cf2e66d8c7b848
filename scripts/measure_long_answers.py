"""Whether the queries of an answer's beginning know what its rest wants, where answers go on for fifty tokens and more.

    python scripts/measure_long_answers.py

Verses of many words are to be said again. The cache is compressed once the question is read, by the prompt's last
queries (SnapKV), or when the first N_d tokens of the answer are said, by their queries too (EntropyInfer's latent
compression, which has N_d = 16); those tokens come from the whole cache in either case. Both are judged from the same
token on, and hold as many entries there; beside them stand the newest entries and chance. Told are the rests that are
said to their end, and the share of a rest's tokens that are the likeliest, those before them given.
"""

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Int
from measure_compression import (
    BASELINE,
    DEPTHS,
    Question,
    answers,
    check_context,
    questions,
    right_answers,
    waiting,
)

from et_jax.control.compression import Compression
from et_jax.evidence import prompt_tables
from et_jax.serve.engine import Model, load
from scripts.measuring import arguments, paired
from scripts.measuring.results import write

TASK = "copying"
WORDS = (16, 50, 64)  # of a verse
WAITS = (4, 16)  # tokens of an answer decoded before its cache is compressed: N_d
POLICIES = ("streaming", "random")  # besides those that rank by queries


def ends(wait: int, model: Model, asked: list[Question], likeliest: Int[np.ndarray, "r t"]) -> list[tuple[bool, float]]:
    """Return of each answer whether it is right to its end, and the share of its tokens after the first `wait`."""
    found = []
    for right, one, row in zip(right_answers(model, asked, likeliest), asked, likeliest, strict=True):
        begin = len(one.prompt) - 1 + wait
        said = row[begin : len(one.prompt) - 1 + len(one.answer)]
        found.append((right, float(np.mean(said == np.asarray(one.answer[wait:])))))
    return found


def measure(model: Model, words: int, wait: int, samples: int) -> list[dict[str, Any]]:
    """Return a line per policy and share of the entries."""
    asked = [one for one in questions(model, TASK, samples, num_pairs=words - 1) if len(one.answer) > wait]
    ways = waiting(model, asked, wait, (BASELINE, *POLICIES))
    dense, found = answers(model, asked, ways, partial(ends, wait))
    entry = {"words": words, "tokens": float(np.mean([len(one.answer) for one in asked])), "waited": wait}
    entry |= {"questions": len(asked), "dense": sum(right for right, _ in dense)}
    entry |= {"dense_share": float(np.mean([share for _, share in dense]))}
    lines = []
    for (name, share), told in found.items():
        shares = np.asarray([each for _, each in told])
        line = entry | {"arm": name, "share": share, "right": sum(right for right, _ in told)}
        line |= {"share_right": float(shares.mean()), "share_interval": paired.interval(shares)}
        if name != BASELINE:
            others = [right for right, _ in found[BASELINE, share]]
            line["p"] = paired.p_of_losses([right for right, _ in told], others)
        lines.append(line)
        print(*line.values(), flush=True)
    return lines


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    parser = arguments.parser(__doc__, "model", results="long_answers.json")
    parser.add_argument(
        "--samples", type=arguments.count(), default=8, help=f"verses at each of {DEPTHS} depths (default 8)"
    )
    args = parser.parse_args()
    with arguments.refusals("measure_long_answers"):  # a verse may be too long for the model
        model = load(args.model, dtype="float32", max_num_seqs=2)
        check_context(model)
        lines = [line for words in WORDS for wait in WAITS for line in measure(model, words, wait, args.samples)]
    print(prompt_tables.long_answers(lines))
    settings = {"model": args.model, "samples": args.samples, "window": Compression.window}
    write(args.output, "scripts/measure_long_answers.py", settings, lines=lines)


if __name__ == "__main__":
    main()

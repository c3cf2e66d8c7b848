"""Questions that a prompt answers itself, amid its text: there what is read before each segment decides.

    python scripts/measure_asked_amid.py

Where a question comes last, its segment is read densely, and a budget can only lose what earlier segments had to look
back for, which is little. Here a question and its answer are a part of the prompt like any other, and more text may
follow: their segment reads what the budget chooses, as `measure_prefill.py` does of held-out text. An answer is right
where each of its tokens is the likeliest after those before it. Every budget's setting is that at which it reads a
share of the blocks of a few such prompts, one of each task; what it reads of a task's prompts is told.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from measure_compression import DEPTHS, Question, questions, right_answers
from measure_prefill import BASELINE, PART, Bench, arms

from et_jax.control.budget import Budget
from et_jax.evidence import prompt_tables
from et_jax.evidence.prompt_arms import logits_of
from et_jax.serve.engine import Model, load
from et_jax.tasks.generators import TASKS
from scripts.measuring import arguments, paired
from scripts.measuring.results import write

SHARES = (0.25, 0.125, 0.0625)
ARMS = (BASELINE, "entropy", "entropy, printed", "level", "mass", "recent", "random")


class Prompts(Bench):
    """Prompts with a question and its answer in them, in whole segments."""

    def __init__(self, model: Model, asked: list[Question], segment: int) -> None:
        self.config, self.params, self.segment = model.config, model.params, segment
        self.plant, self.dense_until, self.asked = self.plant_of(model), 2 * segment, asked
        length = model.max_model_len // segment * segment
        tokens = np.zeros((len(asked), length + 1), np.int32)
        for row, one in zip(tokens, asked, strict=True):
            whole = [*one.prompt, *one.answer]
            row[: len(whole)] = whole
        self.given, self.following = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])

    def right(self, model: Model, budget: Budget) -> tuple[list[bool], float]:
        """Return which questions are answered rightly under a budget, and what share it reads of what it may leave."""
        right, read, held = [], 0.0, 0.0
        for at in range(0, len(self.asked), PART):
            given = self.given[at : at + PART]
            found, *counts, _ = logits_of(self.plant, self.params, budget, given, segment=self.segment)
            likeliest: Int[np.ndarray, "r t"] = np.asarray(jnp.argmax(found, axis=-1))
            right += right_answers(model, self.asked[at : at + PART], likeliest)
            read, held = (total + float(count.sum()) for total, count in zip((read, held), counts, strict=True))
        return right, read / held if held else 1.0


def settings(model: Model, segment: int) -> dict[tuple[str, float], float]:
    """Return the setting of every arm at which it reads a share of the blocks of a few prompts, one of each task."""
    few = Prompts(model, [questions(model, task, 1)[DEPTHS // 2] for task in TASKS], segment)
    made = {name: make for name, make in arms(few).items() if name in ARMS}
    found = {}
    for share in SHARES:
        for name, make in made.items():
            try:
                found[name, share] = few.at_share(make, share, within=0.04)[0]
            except ValueError as error:
                print(f"{name} at {share}: {error}", flush=True)
    return found


def measure(model: Model, segment: int, samples: int) -> list[dict[str, Any]]:
    """Return a line per task, share and arm."""
    lines, at = [], settings(model, segment)
    for task in TASKS:
        prompts = Prompts(model, questions(model, task, samples), segment)
        dense, _ = prompts.right(model, prompts.dense)
        made = arms(prompts)
        for (name, share), setting in at.items():
            right, read = prompts.right(model, made[name](setting))
            line = {"task": task, "questions": len(right), "dense": sum(dense), "share": share, "arm": name}
            line |= {"share_read": read, "right": sum(right), "p": paired.p_of_losses(dense, right)}
            lines.append(line)
            print(*line.values(), flush=True)
    return lines


def main() -> None:
    """Parse the arguments, measure, print a table and write it."""
    args = arguments.parser(__doc__, "model", "samples", "segment", results="asked_amid.json").parse_args()
    with arguments.refusals("measure_asked_amid"):  # a question may be too long for the model
        model = load(args.model, dtype="float32", max_num_seqs=4)
        lines = measure(model, args.segment, args.samples)
    print(prompt_tables.asked_amid(lines))
    told = {"model": args.model, "samples": args.samples, "segment": args.segment}
    told["page_size"] = model.decoder_config.page_size
    write(args.output, "scripts/measure_asked_amid.py", told, lines=lines)


if __name__ == "__main__":
    main()

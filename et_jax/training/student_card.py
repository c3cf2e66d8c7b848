"""The card of a distilled model: its agreement with the teacher, and the loss of each."""

import dataclasses
import itertools
import string
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from et_jax.io.files import replace_file
from et_jax.models.params import Params
from et_jax.training import card, corpus, probe
from et_jax.training.distillation import NEARNESS, Teacher, agreement
from et_jax.training.loop import evaluate
from et_jax.training.settings import Settings

ROWS = 64  # of held-out text, of the longest length, on which student and teacher are compared

INTRODUCTION = """\
A small model that learned to write as [the bundled model](../bundled/README.md) does, worse and faster. It has the same
tokenizer, so it can be its draft in speculative decoding, or the small model beside it in entropy adaptive decoding.
"""

AGREEMENT = string.Template("""\
The targets of the training were not tokens but the teacher's distributions: the loss is KL(p || q), p the teacher's
distribution and q this model's, both at temperature 1, at every position; those of a task's answer count
$answer_weight times. The layers began at random, the embedding as the principal directions of the teacher's.

## Agreement with the teacher

$tokens tokens of the held-out works, in rows of $long spread evenly over them. The sum of min(p, q) is the share of
this model's draws that speculative decoding accepts.

| position | KL(p &#124;&#124; q), nats | sum of min(p, q) | same likeliest token |
| --- | --- | --- | --- |
$positions

On the same tokens this model loses $nats nats per token and the teacher $teacher_nats.

Answers to tasks of the test split, $examples examples of each, of at most $length tokens: right ones, greedy, and the
agreement at the tokens of the answer.

| task | right | the teacher's | sum of min(p, q) | same likeliest token |
| --- | --- | --- | --- | --- |
$tasks

""")

LIMITS = string.Template("""\
On its own it writes phrases, not sentences that follow each other; use the bundled model for text. It finds little
again in what it has read, as the table of tasks tells: where the teacher copies a name or a number from far back, this
model mostly guesses, and as a draft it is refused there. Beyond $context positions it is untrained.
""")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The measurements of student and teacher.

    `by_position` has the means of KL, overlap and equal likeliest tokens between two positions, `tasks` for each
    the student's and the teacher's share of right answers, and the means of overlap and equal likeliest tokens.
    """

    num_tokens: int
    nats: float
    teacher_nats: float
    by_position: dict[tuple[int, int], tuple[float, ...]]
    tasks: dict[str, tuple[float, ...]]


def measure(
    params: Params, settings: Settings, teacher: Teacher, held_out: corpus.Tokens, tokenizer: Tokenizer
) -> Figures:
    """Compare stacked `params` with the teacher on held-out text and on tasks of the test split."""
    length = settings.schedule.lengths[-1]
    taught = dataclasses.replace(settings, model=teacher.config)
    rows = corpus.spread(corpus.held_out_rows(held_out, length), ROWS)
    found = [getattr(agreement(params, settings, teacher, rows), name) for name in NEARNESS]
    edges = [edge for edge in card.BUCKETS if edge < length] + [length]

    def means(begin: int, end: int) -> tuple[float, ...]:
        part = np.s_[:, begin:end]
        return tuple(float(values[part].sum() / rows.target_mask[part].sum()) for values in found)

    pairs = [(0, length), *itertools.pairwise(edges)]
    total = int(rows.target_mask.sum())
    losses = [float(evaluate(*model, rows).sum()) / total for model in ((params, settings), (teacher.params, taught))]
    return Figures(
        num_tokens=total,
        nats=losses[0],
        teacher_nats=losses[1],
        by_position={pair: means(*pair) for pair in pairs},
        tasks=_tasks(params, settings, teacher, held_out, tokenizer),
    )


def _tasks(
    params: Params, settings: Settings, teacher: Teacher, held_out: corpus.Tokens, tokenizer: Tokenizer
) -> dict[str, tuple[float, ...]]:
    """Return the task figures of `Figures`."""
    given = probe.probe(tokenizer, held_out, settings.probed_length, settings.probed_rows, settings.probed_pairs)
    rights = [
        probe.accuracy(*model, given)
        for model in ((params, settings), (teacher.params, dataclasses.replace(settings, model=teacher.config)))
    ]
    rows = corpus.Rows(inputs=given.inputs, targets=given.targets, target_mask=given.answer_mask)
    found = agreement(params, settings, teacher, rows)
    tasks = {}
    for task in dict.fromkeys(given.tasks):
        of_task = np.array(given.tasks) == task
        count = given.answer_mask[of_task].sum()
        near = [float(values[of_task].sum() / count) for values in (found.overlap, found.greedy)]
        tasks[task] = (*(right[task] for right in rights), *near)
    return tasks


def write_card(figures: Figures, settings: Settings, run: card.Run, held_out: corpus.Tokens, path: Path) -> None:
    """Write the model card."""
    length = settings.schedule.lengths[-1]
    lines = []
    for (begin, end), values in figures.by_position.items():
        name = "all" if (begin, end) == (0, length) else f"{begin} to {end - 1}"
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |")
    tasks = [f"| {task} | {' | '.join(f'{value:.2f}' for value in values)} |" for task, values in figures.tasks.items()]
    measured = AGREEMENT.substitute(
        answer_weight=f"{settings.mixture.answer_weight:g}" if settings.mixture else "1",
        tokens=f"{figures.num_tokens:,}",
        long=str(length),
        positions="\n".join(lines),
        nats=f"{figures.nats:.3f}",
        teacher_nats=f"{figures.teacher_nats:.3f}",
        examples=str(settings.probed_rows),
        length=str(settings.probed_length),
        tasks="\n".join(tasks),
    )
    own = {
        "title": "The small bundled model",
        "introduction": INTRODUCTION,
        "measured": measured,
        "limits": LIMITS.substitute(context=settings.model.max_positions),
    }
    replace_file(path, card.CARD.substitute(card.texts(settings, run, held_out) | own))

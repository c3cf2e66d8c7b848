"""The accuracy of the tasks during training: teacher-forced, on examples of the test split."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32
from tokenizers import Tokenizer

from et_jax.models.params import Params
from et_jax.tasks.base import sentences
from et_jax.tasks.generators import TASKS, example
from et_jax.training import corpus, loss
from et_jax.training.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Examples of every task, one to a row, the depths evenly spread; the mask marks the tokens of answers."""

    inputs: Int32[np.ndarray, "b t"]
    targets: Int32[np.ndarray, "b t"]
    answer_mask: Bool[np.ndarray, "b t"]
    tasks: tuple[str, ...]
    depths: tuple[float, ...]


def probe(tokenizer: Tokenizer, held_out: corpus.Tokens, length: int, num_rows: int, num_pairs: int) -> Probe:
    """Return `num_rows` examples of each task, of at most `length` tokens, hidden in sentences of held-out works."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    hay = _hay(tokenizer, held_out)
    rows, tasks, depths = [], [], []
    for task in TASKS:
        for seed, depth in enumerate(np.linspace(0, 1, num_rows)):
            found = example(
                task,
                count=lambda text: len(encode(text)),
                length=length,
                depth=float(depth),
                seed=seed,
                haystack=hay,
                num_pairs=num_pairs,
            )
            rows.append((encode(found.prompt), encode(found.answer)))
            tasks.append(task)
            depths.append(found.depth)
    targets = np.array([_padded([*prompt, *answer], length) for prompt, answer in rows], np.int32)
    inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=corpus.END_ID)
    masks = [[len(prompt) <= i < len(prompt) + len(answer) for i in range(length)] for prompt, answer in rows]
    return Probe(inputs=inputs, targets=targets, answer_mask=np.array(masks), tasks=tuple(tasks), depths=tuple(depths))


def right(params: Params, settings: Settings, given: Probe, batch_tokens: int = 8192) -> Bool[np.ndarray, " b"]:
    """Return which examples have every token of their answer likeliest, from stacked `params`."""
    size = max(1, batch_tokens // given.inputs.shape[1])
    found = []
    for begin in range(0, len(given.inputs), size):
        rows = slice(begin, begin + size)
        short = size - len(given.inputs[rows])
        inputs, targets = (np.pad(y[rows], ((0, short), (0, 0))) for y in (given.inputs, given.targets))
        hits = np.asarray(loss.hits(params, settings.model, inputs, targets))[: size - short]
        found.append((hits | ~given.answer_mask[rows]).all(axis=1))
    return np.concatenate(found)


def accuracy(params: Params, settings: Settings, given: Probe) -> dict[str, float]:
    """Return the share of right answers of every task."""
    answers, tasks = right(params, settings, given), np.array(given.tasks)
    return {str(task): float(answers[tasks == task].mean()) for task in dict.fromkeys(given.tasks)}


def _hay(tokenizer: Tokenizer, held_out: corpus.Tokens, windows: int = 16, window: int = 2048) -> list[str]:
    starts = np.linspace(0, max(0, len(held_out.ids) - window), windows).astype(int)
    return [
        sentence
        for start in starts
        for sentence in sentences(tokenizer.decode(held_out.ids[start : start + window].tolist()))[1:-1]
    ]


def _padded(ids: Sequence[int], length: int) -> list[int]:
    return [*ids, *[corpus.END_ID] * (length - len(ids))]

"""Rows of novels and of tasks for one training step: documents packed into rows, with weights for their answers."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float32, Int32
from tokenizers import Tokenizer

from et_jax.tasks import words
from et_jax.tasks.base import Document, sentences
from et_jax.tasks.generators import document
from et_jax.tasks.words import Vocabulary
from et_jax.training import corpus

SHORTEST = 96  # tokens of a document: every task fits
_HAY_WINDOWS = 2  # of the corpus, whose sentences hide the needles of one step
_PER_PAIR = {"multi_key": 20, "copying": 7, "tracing": 32}  # tokens of a key, its word and its question
_MOST_TURNS = 32
_WORD_TOKENS = 2  # of a name or a word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """The share and the kinds of tasks in a step, and the weights of their tokens relative to a novel's.

    `task_shares` are (first step, share of the tokens that are tasks): high while the circuits for recall form,
    lower afterwards. `invented` is the share of task documents whose needles are hidden in invented sentences
    rather than in a novel's.
    """

    task_shares: tuple[tuple[int, float], ...] = ((0, 0.75), (520, 0.5))
    tasks: tuple[tuple[str, float], ...] = (
        ("single_key", 1.0),
        ("multi_key", 3.0),
        ("passkey", 1.0),
        ("multi_needle", 1.0),
        ("tracing", 1.0),
        ("line_retrieval", 1.0),
        ("counting", 0.5),
        ("copying", 3.0),
    )
    answer_weight: float = 5.0
    other_weight: float = 0.1
    invented: float = 0.3

    def num_novels(self, step: int, num_windows: int) -> int:
        """Return how many of the windows of `step` are taken from novels.

        If the share of tasks is not an integer number of windows, steps with more and with fewer alternate.
        """
        share = [share for begin, share in self.task_shares if begin <= step][-1]
        before, after = (math.floor(share * num_windows * count) for count in (step, step + 1))
        return num_windows - (after - before)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows to train on: a target is weighted by `weights`, and a token attends only to its own segment.

    None means equal weights, and rows of one segment each.
    """

    inputs: Int32[np.ndarray, "b t"]
    targets: Int32[np.ndarray, "b t"]
    weights: Float32[np.ndarray, "b t"] | None = None
    segments: Int32[np.ndarray, "b t"] | None = None


def mixed_rows(
    mixture: Mixture,
    tokens: corpus.Tokens,
    tokenizer: Tokenizer,
    *,
    seed: int,
    step: int,
    num_windows: int,
    length: int,
    window: int = corpus.WINDOW,
) -> Batch:
    """Return the rows of one step, novels first; they depend only on the arguments."""
    num_novels = mixture.num_novels(step, num_windows)
    per_window = window // length
    given = corpus.training_rows(tokens, seed, step, num_windows, length, window)  # so that no window is repeated
    inputs, targets = (y[: num_novels * per_window] for y in (given.inputs, given.targets))
    parts = [(inputs, targets, np.ones(inputs.shape, np.float32), np.zeros(inputs.shape, np.int32))]
    if num_novels < num_windows:
        random = np.random.default_rng((seed, step, 1))
        hay = haystack(tokens, tokenizer, random, window)
        used = vocabulary(hay, tokenizer)
        for _ in range((num_windows - num_novels) * per_window):
            row = packed(mixture, tokenizer, random, length, hay, used)
            parts.append(tuple(leaf[None] for leaf in row))
    inputs, targets, weights, segments = (np.concatenate(leaves) for leaves in zip(*parts, strict=True))
    return Batch(inputs=inputs, targets=targets, weights=weights, segments=segments)


def haystack(tokens: corpus.Tokens, tokenizer: Tokenizer, random: np.random.Generator, window: int) -> list[str]:
    """Return the sentences of a few places in the training works, without the cut first and last one of a place."""
    found = []
    for start in random.integers(len(tokens.ids) - window, size=_HAY_WINDOWS):
        found += sentences(tokenizer.decode(tokens.ids[start : start + window].tolist()))[1:-1]
    return found


def vocabulary(hay: Sequence[str], tokenizer: Tokenizer) -> Vocabulary:
    """Return the words of a step's sentences as names and words of the training split, at most two tokens each.

    Over the steps all such words of the novels become keys and answers, except those of the test split. From
    a short list a model learns which words are answers, and then outputs no other. Passages may have any words.
    """
    found = list(dict.fromkeys(re.findall(r"(?<= )[a-z]{3,}\b", "".join(hay))))

    def short(items: Iterable[str]) -> list[str]:
        listed = list(items)
        encoded = tokenizer.encode_batch([f" {item}" for item in listed], add_special_tokens=False)
        return [item for item, tokens in zip(listed, encoded, strict=True) if len(tokens.ids) <= _WORD_TOKENS]

    own, lower = words.vocabulary("train"), short(found)
    return Vocabulary(
        names=words.side(short((*own.names, *(word.capitalize() for word in found))), "train"),
        words=words.side((*short(own.words), *lower), "train"),
        copied=words.side((*short(own.words), *lower), "train") + words.side(lower, "test"),
    )


def documents(
    mixture: Mixture,
    tokenizer: Tokenizer,
    random: np.random.Generator,
    length: int,
    hay: Sequence[str],
    used: Vocabulary,
) -> list[Document]:
    """Return documents of tasks that together fill a row of `length` tokens, drawn by the mixture."""
    names, shares = zip(*mixture.tasks, strict=True)
    chances = np.array(shares) / sum(shares)
    found, left = [], length
    while left >= SHORTEST:
        size = left if random.random() < 0.5 else int(random.integers(SHORTEST, left + 1))
        task = str(random.choice(names, p=chances))
        found.append(
            document(
                task,
                count=lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
                length=size,
                depth=float(random.random()),
                seed=int(random.integers(2**62)),
                split="train",
                haystack=None if random.random() < mixture.invented or not hay else hay,
                words=used,
                num_turns=_MOST_TURNS,
                num_pairs=int(random.integers(min(_MOST_TURNS, size // _PER_PAIR.get(task, size)))),
            )
        )
        left -= size
    return found


def packed(
    mixture: Mixture,
    tokenizer: Tokenizer,
    random: np.random.Generator,
    length: int,
    hay: Sequence[str],
    used: Vocabulary,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return one row of documents: inputs, targets, weights, segments; each document begins with END_ID."""
    inputs, targets = np.full(length, corpus.END_ID, np.int32), np.full(length, corpus.END_ID, np.int32)
    weights, segments = np.zeros(length, np.float32), np.zeros(length, np.int32)
    begin = 0
    for index, found in enumerate(documents(mixture, tokenizer, random, length, hay, used)):
        ids, counts = encode(found, tokenizer, mixture)
        end = begin + len(ids)
        inputs[begin + 1 : end], targets[begin:end], weights[begin:end] = ids[:-1], ids, counts
        segments[begin:end] = index
        begin = end
    segments[begin:] = -1
    return inputs, targets, weights, segments


def encode(found: Document, tokenizer: Tokenizer, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a document with all its answers, and the weight of each."""
    pieces = [(found.context, mixture.other_weight)]
    for turn in found.turns:
        pieces += [(turn.question, mixture.other_weight), (turn.answer, mixture.answer_weight), (".", 1.0)]
    ids, weights = [], []
    for text, weight in pieces:
        part = tokenizer.encode(text, add_special_tokens=False).ids
        ids += part
        weights += [weight] * len(part)
    return np.array(ids, np.int32), np.array(weights, np.float32)

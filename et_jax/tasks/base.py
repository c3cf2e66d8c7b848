"""The definition of a task: a text with a hidden answer, a question, and the layout of the text.

Every piece of text but the first begins with a space, so that the tokens of the full text are those of its pieces.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from et_jax.errors import UsageError
from et_jax.tasks.words import VERBS, Split, Vocabulary, vocabulary

CountTokens = Callable[[str], int]
"""The number of tokens of a text, without those that a tokenizer puts before one."""

Match = Literal["start", "contains", "number"]

_SPLITS: tuple[Split, ...] = ("train", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A question and its answer; `depth` is the answer's place in the context, 0 the first token, 1 the last."""

    question: str
    answer: str
    depth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A context and the questions that follow it, each answered before the next.

    `items` are the keys and passages that no document of the other split may contain.
    """

    task: str
    context: str
    turns: tuple[Turn, ...]
    items: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and the answer that its greedy continuation should give; `right` defines the match.

    `length` counts the tokens of prompt and answer, `depth` is the answer's place in the context (0..1). The prompt
    ends with `question`, which is empty if the entire prompt is the question.
    """

    task: str
    prompt: str
    answer: str
    depth: float
    length: int
    match: Match = "start"
    question: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needle:
    """A sentence to hide at a depth."""

    text: str
    depth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentPlan:
    """A generator's output: the needles and the turns; `filled` False adds no sentences between them."""

    needles: tuple[Needle, ...]
    turns: tuple[Turn, ...]
    items: tuple[str, ...]
    filled: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The input of a generator.

    `room` is the tokens of all text, `depth` that of the first answer, `num_turns` the most
    questions, `num_pairs` the number of keys besides that of the first question.
    """

    random: np.random.Generator
    words: Vocabulary
    split: Split
    count: CountTokens
    room: int
    depth: float
    num_turns: int
    num_pairs: int


def right(example: Example, text: str) -> bool:
    """Return whether a continuation of the prompt gives the answer.

    "start": it begins with the answer, and the last word ends there. "contains": it contains the answer,
    case-insensitively. "number": its last number is the answer.
    """
    if example.match == "contains":
        return example.answer.lower() in text.lower()
    if example.match == "number":
        numbers = re.findall(r"-?\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))
        return bool(numbers) and float(numbers[-1]) == float(example.answer)
    return text.startswith(example.answer) and not text[len(example.answer) :][:1].isalnum()


def stream(task: str, split: Split, seed: int) -> np.random.Generator:
    """Return the random numbers of one document: independent for every task, split and seed."""
    return np.random.default_rng([*task.encode(), _SPLITS.index(split), seed])


def sentences(text: str) -> list[str]:
    """Return the sentences of a text as pieces that begin with a space, with white space collapsed."""
    found = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [f" {sentence}" for sentence in found if sentence]


def filler(random: np.random.Generator, words: Vocabulary) -> Iterator[str]:
    """Yield meaningless sentences endlessly."""
    while True:
        first, second, place = (words.words[i] for i in random.choice(len(words.words), 3, replace=False))
        yield f" The {first} {VERBS[random.choice(len(VERBS))]} the {second} by the {place}."


def lay_out(plan: DocumentPlan, setting: Setting, haystack: Sequence[str] | None) -> str:
    """Return the context: sentences up to the available room, with each needle at its depth.

    Sentences are taken from `haystack` from a random place on, wrapping around its end; None invents them.
    """
    taken = sum(setting.count(needle.text) for needle in plan.needles)
    taken += sum(setting.count(turn.question + turn.answer + ".") for turn in plan.turns)
    space = setting.room - taken
    if space < 0:
        raise UsageError(f"A text of {setting.room} tokens is too short for this task; give it at least {taken}.")
    hay, sizes = _hay(setting, haystack, space if plan.filled else 0)
    ends = np.cumsum([0, *sizes])
    pieces: list[list[str]] = [[] for _ in ends]
    for needle in sorted(plan.needles, key=lambda needle: needle.depth):
        pieces[int(np.abs(ends - needle.depth * ends[-1]).argmin())].append(needle.text)
    return "".join("".join(here) + after for here, after in zip(pieces, [*hay, ""], strict=True))


def _hay(setting: Setting, haystack: Sequence[str] | None, space: int) -> tuple[list[str], list[int]]:
    """Return sentences that fit into `space` tokens, and their sizes; one that is too long is skipped."""
    if haystack is None:
        source = filler(setting.random, setting.words)
        tries = space
    else:
        start = int(setting.random.integers(len(haystack)))
        source = (haystack[(start + i) % len(haystack)] for i in range(len(haystack)))
        tries = len(haystack)
    hay, sizes, misses = [], [], 0
    for sentence, _ in zip(source, range(tries), strict=False):
        size = setting.count(sentence)
        if sum(sizes) + size > space:
            misses += 1
            if misses == 4:
                break
            continue
        hay.append(sentence)
        sizes.append(size)
    return hay, sizes


def setting(
    task: str,
    count: CountTokens,
    length: int,
    depth: float,
    seed: int,
    split: Split,
    num_turns: int,
    num_pairs: int,
    words: Vocabulary | None,
) -> Setting:
    """Return the input of a generator, with its arguments checked."""
    if not 0 <= depth <= 1:
        raise UsageError(f"depth is {depth}; it must be from 0 (the start of the context) to 1 (its end).")
    if num_turns < 1 or num_pairs < 0:
        raise UsageError("A task asks at least one question and has no fewer than 0 other keys.")
    return Setting(
        random=stream(task, split, seed),
        words=words or vocabulary(split),
        split=split,
        count=count,
        room=length - 1,  # without the token before every text
        depth=depth,
        num_turns=num_turns,
        num_pairs=num_pairs,
    )

"""The tasks by name: seeded generators of documents and examples with answers that are matched exactly.

Formats are plain and short, made for models of a few million weights. Single and multi-key recall, several
needles and variable tracing are RULER's (Hsieh et al. 2024); the passkey is Mohtashami and Jaggi's (2023); line
retrieval is LongEval's (Li et al. 2023).
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from et_jax.errors import UsageError
from et_jax.tasks.base import CountTokens, Document, DocumentPlan, Example, Needle, Setting, Turn, lay_out, setting
from et_jax.tasks.words import Split, Vocabulary, belongs

NUM_PAIRS = 7  # keys of a test besides the one asked for, if a task has keys
_NUM_NEEDLES = 3
_HOPS = 2  # of a trace
_COUNTED = 5  # different words of a count
_ORDINALS = ("first", "second", "third")


def single_key(s: Setting) -> DocumentPlan:
    """One key with its word, hidden in the text."""
    return _recall(s, 0)


def multi_key(s: Setting) -> DocumentPlan:
    """Many keys, each with its word; the wrong ones look like the right one."""
    return _recall(s, s.num_pairs)


def passkey(s: Setting) -> DocumentPlan:
    """One number of five digits, hidden in the text; the first digit cannot merge with the space before it."""
    number = _number(s)
    turn = Turn(question=" The passkey is", answer=f" {number}", depth=s.depth)
    return DocumentPlan(needles=(_statement(turn),), turns=(turn,), items=(number,))


def multi_needle(s: Setting) -> DocumentPlan:
    """Three words at three places, to be listed in their order; `depth` is that of the first."""
    [name] = _names(s, 1)
    words = s.random.choice(s.words.words, _NUM_NEEDLES, replace=False)
    depths = np.sort([s.depth, *(s.depth + (1 - s.depth) * s.random.random(_NUM_NEEDLES - 1))])
    texts = [f" The {ordinal} word of {name} is {word}." for ordinal, word in zip(_ORDINALS, words, strict=True)]
    question = f" The {_ORDINALS[0]} word of {name} is"
    turn = Turn(question=question, answer="".join(texts).removeprefix(question).removesuffix("."), depth=s.depth)
    needles = tuple(Needle(text=text, depth=depth) for text, depth in zip(texts, depths, strict=True))
    return DocumentPlan(needles=needles, turns=(turn,), items=(name,))


def tracing(s: Setting) -> DocumentPlan:
    """Chains of names, each following another, to be traced to the word at their end; `depth` is that of the word.

    The statements of a chain are at random places in any order.
    """
    num_chains = max(1, min(1 + s.num_pairs // 3, len(s.words.names) // (_HOPS + 1)))
    names = s.random.permutation(s.words.names)[: num_chains * (_HOPS + 1)].reshape(num_chains, _HOPS + 1)
    words = s.random.choice(s.words.words, num_chains, replace=False)
    needles, turns = [], []
    for index, (chain, word) in enumerate(zip(names, words, strict=True)):
        depth = s.depth if index == 0 else float(s.random.random())
        texts = [f" {name} follows {after}." for name, after in itertools.pairwise(chain)]
        texts.append(f" {chain[-1]} holds {word}.")
        depths = [*s.random.random(_HOPS), depth]
        needles += [Needle(text=text, depth=float(d)) for text, d in zip(texts, depths, strict=True)]
        question = f" {chain[0]} follows"
        answer = "".join(texts).removeprefix(question).removesuffix(".")
        turns.append(Turn(question=question, answer=answer, depth=depth))
    return DocumentPlan(needles=tuple(needles), turns=tuple(turns[: s.num_turns]), items=tuple(names.flat))


def line_retrieval(s: Setting) -> DocumentPlan:
    """A text of only lines, each with an id of two words and a word."""
    lines: dict[str, str] = {}
    left = s.room
    while True:
        first, second, word = (str(word) for word in s.random.choice(s.words.words, 3))
        question, answer = f" Line {first} {second}:", f" {word}"
        left -= s.count(f"{question}{answer}.") * (2 if len(lines) < s.num_turns else 1)  # asked lines occur twice
        if left < 0:
            break
        lines[question] = answer
    if not lines:
        raise UsageError(f"A text of {s.room} tokens is too short for a line and a question; give it more.")
    asked = list(lines)[: s.num_turns]
    order = [asked[0], *s.random.permutation(list(lines)[1:])]
    place = round(s.depth * (len(order) - 1))
    order = [*order[1 : place + 1], order[0], *order[place + 1 :]]
    depths = dict(zip(order, np.linspace(0, 1, len(order)) if len(order) > 1 else [0.0], strict=True))
    return DocumentPlan(
        needles=tuple(Needle(text=f"{line}{lines[line]}.", depth=float(depths[line])) for line in order),
        turns=tuple(Turn(question=line, answer=lines[line], depth=float(depths[line])) for line in asked),
        items=tuple(line.removeprefix(" Line ").removesuffix(":") for line in order),
        filled=False,
    )


def counting(s: Setting) -> DocumentPlan:
    """A list of a few words, one of them twice as often as each other; the answer is everywhere, so depth is 0."""
    several = [str(word) for word in s.random.choice(s.words.words, _COUNTED, replace=False)]
    turn = Turn(question=" The most frequent word is", answer=f" {several[0]}", depth=0.0)
    round_of = [several[0], *several]
    asked, once = s.count(turn.question + turn.answer + "."), "".join(f" {word}" for word in round_of)
    rounds = max(1, (s.room - asked) // s.count(once))
    while rounds > 1 and s.count(f" List:{once * rounds}.") + asked > s.room:
        rounds -= 1
    listed = "".join(f" {word}" for word in s.random.permutation(round_of * rounds))
    return DocumentPlan(needles=(Needle(text=f" List:{listed}.", depth=0.0),), turns=(turn,), items=(), filled=False)


def copying(s: Setting) -> DocumentPlan:
    """A passage of words under a name, far back, to be repeated: as many words as there are keys elsewhere."""
    [name] = _names(s, 1)
    if s.num_pairs >= len(s.words.copied):
        raise UsageError(f"There are {len(s.words.copied)} words for a verse of {1 + s.num_pairs}; ask for fewer.")
    passage = " ".join(s.random.choice(s.words.copied, 1 + s.num_pairs, replace=False))
    turn = Turn(question=f" The verse of {name}:", answer=f" {passage}", depth=s.depth)
    return DocumentPlan(needles=(_statement(turn),), turns=(turn,), items=(name, passage))


TASKS: dict[str, Callable[[Setting], DocumentPlan]] = {
    generator.__name__: generator
    for generator in (
        single_key,
        multi_key,
        passkey,
        multi_needle,
        tracing,
        line_retrieval,
        counting,
        copying,
    )
}


def document(
    task: str,
    *,
    count: CountTokens,
    length: int,
    depth: float,
    seed: int,
    split: Split = "test",
    haystack: Sequence[str] | None = None,
    num_turns: int = 1,
    num_pairs: int = NUM_PAIRS,
    words: Vocabulary | None = None,
) -> Document:
    """Return a document of at most `length` tokens, including the one before every text.

    `count` returns the tokens of a text. `haystack` has sentences, each beginning with a space, to hide
    the needles in; None invents some. `words` replaces the short list of the split. The same
    arguments return the same document.

    Raises UsageError for an unknown task, a depth outside 0..1, and a length that is too short.
    """
    if task not in TASKS:
        raise UsageError(f'There is no task "{task}"; choose one of {", ".join(TASKS)}.')
    if haystack is not None and not haystack:
        raise UsageError("The haystack holds no sentence; give a longer text, or none.")
    given = setting(task, count, length, depth, seed, split, num_turns, num_pairs, words)
    plan = TASKS[task](given)
    return Document(task=task, context=lay_out(plan, given, haystack), turns=plan.turns, items=plan.items)


def example(
    task: str,
    *,
    count: CountTokens,
    length: int,
    depth: float,
    seed: int,
    split: Split = "test",
    haystack: Sequence[str] | None = None,
    num_pairs: int = NUM_PAIRS,
) -> Example:
    """Return a document with its one question as a prompt; arguments are those of `document`."""
    found = document(
        task,
        count=count,
        length=length,
        depth=depth,
        seed=seed,
        split=split,
        haystack=haystack,
        num_pairs=num_pairs,
    )
    turn = found.turns[0]
    prompt = found.context + turn.question
    length = 1 + count(prompt + turn.answer)
    return Example(
        task=task, prompt=prompt, answer=turn.answer, depth=turn.depth, length=length, question=turn.question
    )


def _recall(s: Setting, num_others: int) -> DocumentPlan:
    names = _names(s, 1 + num_others)
    words = s.random.choice(s.words.words, len(names), replace=False)
    depths = [s.depth, *s.random.random(len(names) - 1)]
    turns = [
        Turn(question=f" The word of {name} is", answer=f" {word}", depth=float(depth))
        for name, word, depth in zip(names, words, depths, strict=True)
    ]
    asked = turns[:1] + [turns[1 + i] for i in s.random.permutation(len(turns) - 1)]
    return DocumentPlan(
        needles=tuple(_statement(turn) for turn in turns),
        turns=tuple(asked[: s.num_turns]),
        items=tuple(names),
    )


def _statement(turn: Turn) -> Needle:
    return Needle(text=f"{turn.question}{turn.answer}.", depth=turn.depth)


def _names(s: Setting, number: int) -> list[str]:
    if number > len(s.words.names):
        raise UsageError(f"There are {len(s.words.names)} names for {number} keys; ask for fewer.")
    return [str(name) for name in s.random.choice(s.words.names, number, replace=False)]


def _number(s: Setting) -> str:
    while True:
        number = str(s.random.integers(20_000, 100_000))
        if belongs(number, s.split):
            return number

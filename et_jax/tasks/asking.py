"""Runs a model on tasks: examples on a grid of lengths and depths, and its greedy answers."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from et_jax.control.presets import preset
from et_jax.io.known import known_or_none, ratio
from et_jax.serve.totals import Totals
from et_jax.tasks.answers import Answer, Answers
from et_jax.tasks.base import CountTokens, Example, right
from et_jax.tasks.generators import NUM_PAIRS, example
from et_jax.text import Tokenizer

if TYPE_CHECKING:
    from et_jax.serve.completions import Completion
    from et_jax.serve.engine import Model

_INSTRUCTION = "Read this text and finish its last sentence."
_MAX_TOKENS = {"contains": 64, "number": 320}  # of an answer in free form


def evaluate(
    model: "Model", asked: Sequence[tuple[int, Example]], *, control: Any = None, chat: bool = False
) -> Answers:
    """Return the greedy answers of a model to examples, each with the length it is reported under.

    `control` replaces the model's own, as in `Model.generate`, except that a named preset selects blocks at every
    length, so that its reads are measured. With `chat` the model's chat template is used: the text is the user's
    message, and the answer begins with the question. Raises UsageError if the model has no template.
    """
    control = preset(control) if isinstance(control, str) else control
    answers: dict[int, Answer] = {}
    count = counter(model)
    limits = [_MAX_TOKENS.get(given.match) or count(given.answer) + 1 for _, given in asked]
    for limit in sorted(set(limits)):
        selected = [i for i, wanted in enumerate(limits) if wanted == limit]
        prompts = [_chat(model.tokenizer, asked[i][1]) if chat else asked[i][1].prompt for i in selected]
        completions = model.generate(prompts, max_tokens=limit, temperature=0.0, control=control)
        for i, completion in zip(selected, completions, strict=True):
            length, given = asked[i]
            answers[i] = Answer(
                example=given,
                length=length,
                text=completion.checked().text,
                right=right(given, completion.text),
                **_figures(completion),
            )
    return Answers(answers[i] for i in range(len(asked)))


def _chat(tokenizer: Tokenizer, asked: Example) -> list[int]:
    """Return the ids of an example as a chat."""
    text = asked.prompt.removesuffix(asked.question).strip()
    message = f"{_INSTRUCTION}\n\n{text}" if asked.question else text
    ids = tokenizer.chat([{"role": "user", "content": message}])
    return ids + tokenizer.backend.encode(asked.question.strip(), special=False)


def chat_tokens(tokenizer: Tokenizer) -> int:
    """Return the most tokens that a chat adds to a text. Raises UsageError without a template."""
    return len(tokenizer.chat([{"role": "user", "content": f"{_INSTRUCTION}\n\n"}])) + 1


def _figures(completion: "Completion") -> dict[str, float | None]:
    """Return the shares and the entropies of an answer."""
    totals = Totals.of([completion])
    figures = {
        "share_read": totals.share_read if totals.blocks_held else 0.0,
        "share_bytes": totals.share_bytes,
        "prompt_share_read": totals.prompt_share_read,
        "prompt_mass_kept": totals.prompt_mass_kept,
        "share_held": totals.share_cached if totals.tokens_left_out else None,
        "share_by_model": 1 - totals.small_share,
        "share_agreed": ratio(totals.agreed, totals.audited),
        "entropy": totals.entropy,
        "attention_entropy": totals.attention_entropy,
    }
    return {name: known_or_none(figure) for name, figure in figures.items()}


def counter(model: "Model") -> CountTokens:
    """Return the function that counts the tokens of a text, without those that the tokenizer puts before one."""
    opening = len(model.tokenizer.encode(""))
    return lambda text: len(model.tokenizer.encode(text)) - opening


def grid(
    count: CountTokens,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    depths: int,
    samples: int,
    pairs: int = NUM_PAIRS,
    seed: int = 0,
    haystack: Sequence[str] | None = None,
    taken: int = 0,
) -> list[tuple[int, Example]]:
    """Return `samples` examples of the test split for every task, length and depth, with the length.

    An example leaves `taken` of its length for other tokens, such as those of a chat template.
    """
    made = functools.partial(example, count=count, haystack=haystack, num_pairs=pairs)
    return [
        (
            length,
            made(task, length=length - taken, depth=float(depth), seed=seed * 1_000_003 + number * samples + sample),
        )
        for task in tasks
        for length in lengths
        for number, depth in enumerate(np.linspace(0, 1, depths))
        for sample in range(samples)
    ]

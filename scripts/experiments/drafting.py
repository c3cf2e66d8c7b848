"""What do drafts save of a model's time on a text, and how many are accepted?

Prompts were written down before any figure: greedily those that ask for copies, for summaries and for code, and chats;
freely, at temperature 0.7, the openings of stories. Those `of nearly its context` are windows of a text that leave room
for the tokens alone, greedily. Every text with drafts is checked to be the plain one. Prompts are cached by the time
that texts are timed.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from et_jax.errors import UsageError
from et_jax.io.texts import read_text
from et_jax.serve.engine import Model, load
from et_jax.serve.requests import SamplingParams
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.results import REPOSITORY
from scripts.measuring.timing import Round, seconds

PROMPTS = REPOSITORY / "benchmarks/prompts/drafting.json"
LONG = "of nearly its context"
DRAFTERS = ("lookup", "small model", "self")


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    small: str = experiment.model("bundled-small")
    drafters: tuple[str, ...] = setting(DRAFTERS, "drafters", choices=DRAFTERS)
    shares: tuple[float, ...] = setting(
        (0.04, 0.08, 0.15), "of blocks, that the model's own drafts read", least=0.01, most=1.0, quick=(0.5,)
    )
    text: Path = setting(REPOSITORY / "README.md", "of which long prompts are cut", kind="text")
    prompts: int = setting(3, "prompts of a kind at most", least=1, quick=1)
    tokens: int = setting(120, "tokens of a text", least=2, quick=8)
    most: int = setting(8, "tokens drafted at most", least=1)
    rounds: int = setting(5, "rounds in which the drafters take turns", least=2, quick=2)


def started(model: Model, prompt: str | list[int], params: SamplingParams, expected: tuple[int, ...]) -> Round:
    """Return a round of a text. Raises UsageError where it is not the expected one."""
    [got] = model.generate([prompt], params)
    if got.token_ids != expected:
        raise UsageError(f"Drafts changed the text after {str(prompt)[:60]!r}.")
    drafted, accepted = (sum(getattr(row, name) for row in got.trace) for name in ("drafted", "accepted"))
    counts = {"drafted": drafted, "accepted": accepted, "tokens_per_step": len(expected) / (len(expected) - accepted)}

    def timed() -> dict[str, float]:
        took = seconds(lambda: model.generate([prompt], params) and None)
        return {"tokens_per_second": params.max_tokens / took} | counts

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each prompt."""
    drafters: dict[str, dict[str, Any]] = {
        "lookup": {"draft": "lookup"},
        "small model": {"draft": settings.small},
        **{f"self, {share:g} of the blocks": {"draft": "self", "draft_share": share} for share in settings.shares},
    }
    drafters = {name: how for name, how in drafters.items() if name.split(",")[0] in settings.drafters}
    plain = load(settings.model, max_num_seqs=1)
    models = {"plain": plain}
    for name, how in drafters.items():
        models[name] = load(settings.model, max_num_seqs=1, draft_tokens=settings.most, **how)
    prompts: dict[str, list[str | list[int]]] = json.loads(PROMPTS.read_text(encoding="utf-8"))
    words, size = plain.tokenizer.encode(read_text(settings.text, "The text")), plain.max_model_len - settings.tokens
    prompts[LONG] = [words[number * size :][:size] for number in range(len(words) // size)]
    for kind, each in prompts.items():
        for number, prompt in enumerate(each[: settings.prompts]):
            heat = 0.7 if kind == "free" else 0.0
            params = SamplingParams(max_tokens=settings.tokens, temperature=heat, seed=number, ignore_eos=True)
            [text] = plain.generate([prompt], params)
            arms = {name: partial(started, model, prompt, params, text.token_ids) for name, model in models.items()}
            labels = {"kind": kind, "prompt": number}
            yield Group(labels=labels, arms=arms, baseline="plain", rounds=settings.rounds)


FIGURES = {
    "tokens_per_second": Figure(header="tokens a second", against="ratio"),
    "tokens_per_step": Figure(header="tokens a step"),
    "drafted": Figure(header="drafted"),
    "accepted": Figure(header="accepted"),
}

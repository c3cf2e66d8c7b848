"""Which tasks are still answered rightly where presets read a part of a long text, and does entropy tell wrong answers?

Every task is asked of the model alone, its own tokens fed back to it. Rows are questions: each answer is compared with
that to the same question with everything read. Quest and the window read an eighth of the blocks.

A last group has the AUC of signals over all tasks. Rows are wrong answers: the share of right answers to the same task
whose signal is lesser, ties counting half. Its mean over rows is the probability that the signal of a wrong answer is
greater than that of a right one: 0.5 is a coin.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.serve.engine import load
from et_jax.tasks.answers import Answers
from et_jax.tasks.asking import chat_tokens, counter, evaluate, grid
from et_jax.tasks.generators import NUM_PAIRS, TASKS
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, Missed, grouped, setting
from scripts.measuring.selectors import COMPARED

CONTROLS = COMPARED | {f"entropyinfer {size}": preset("entropyinfer", prefill_budget=size) for size in (256, 128)}
SHARES = ("share_read", "share_bytes", "prompt_share_read")
SIGNALS = ("entropy", "attention_entropy", "share_read")


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model()
    tasks: tuple[str, ...] = setting(tuple(TASKS), "tasks", choices=tuple(TASKS), quick=("single_key",))
    length: int = setting(2048, "tokens of a question with its answer", least=32, quick=128)
    depths: int = setting(5, "places of the answer in the text", least=1, quick=2)
    samples: int = setting(8, "questions at each depth", least=1, quick=1)
    pairs: int = setting(NUM_PAIRS, "keys besides the one asked for", least=0)
    chat: str = setting("no", "whether the model's chat template asks", choices=("yes", "no"))
    controls: tuple[str, ...] = setting(
        tuple(CONTROLS), "presets and selectors", choices=tuple(CONTROLS), quick=("off", "certified 0.5")
    )


def exceeded(signal: Float[np.ndarray, " r"], wrong: Bool[np.ndarray, " r"]) -> Float[np.ndarray, " w"]:
    """Return of each wrong answer the share of right ones whose signal is lesser, ties counting half; none without."""
    of_wrong, of_right = signal[wrong, None], signal[~wrong]
    if not of_right.size:
        return np.empty(0)
    return ((of_wrong > of_right) + 0.5 * (of_wrong == of_right)).mean(axis=1)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each task, and one of signals."""
    served = load(settings.model)
    if settings.length > served.max_model_len:
        raise UsageError(f"--length is {settings.length}; {served.name} takes at most {served.max_model_len} tokens.")
    chat = settings.chat == "yes"
    sizes = {name: getattr(settings, name) for name in ("depths", "samples", "pairs", "seed")}
    sizes["taken"] = chat_tokens(served.tokenizer) if chat else 0

    @cache
    def asked(name: str, task: str) -> Answers:
        return evaluate(
            served, grid(counter(served), [task], [settings.length], **sizes), control=CONTROLS[name], chat=chat
        )

    def known(name: str, task: str, *figures: str) -> dict[str, Any]:
        values = {figure: [getattr(one, figure) for one in asked(name, task)] for figure in ("right", *figures)}
        return {figure: np.asarray(each, np.float64) for figure, each in values.items() if None not in each}

    def auc(name: str, signal: str) -> dict[str, Any]:
        found = [known(name, task, signal) for task in settings.tasks]
        if any(signal not in one for one in found):
            raise Missed("not measured")
        rows = np.concatenate([exceeded(one[signal], one["right"] == 0) for one in found])
        if not rows.size:
            raise Missed("no task has both right and wrong answers")
        return {"auc": rows}

    baseline = "off" if "off" in settings.controls else None
    yield from grouped(
        "task", settings.tasks, settings.controls, lambda name, task: known(name, task, *SHARES), baseline
    )
    signals = {f"{name}, {signal}": partial(auc, name, signal) for name in settings.controls for signal in SIGNALS}
    yield Group(labels={"task": "all"}, arms=signals)


FIGURES = {
    "right": Figure(header="right answers", against="difference"),
    "share_read": Figure(header="blocks read"),
    "share_bytes": Figure(header="bytes moved"),
    "prompt_share_read": Figure(header="blocks read of prompts"),
    "auc": Figure(header="AUC, wrong answers"),
}

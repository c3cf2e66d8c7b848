"""Does reading a part of the blocks save time on a real model, by the length of the context?

The model continues the beginning of a text greedily, one sequence at a time, and the arms take turns: presets, which
select blocks at every token, `adaptive` that selects them at every 4th to 16th, and Quest, which reads a fixed share of
them and selects at every token or at every 16th. Each chooses blocks at
every length. Counted is the time between the first and the last new token, with traces, without the prompt.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from et_jax.control import refresh
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.serve.engine import load
from et_jax.serve.model import Model
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.selectors import quest, reading
from scripts.measuring.text import texts
from scripts.measuring.timing import Round

LONGEST_TOKEN = 16  # characters of a token, which few have
PRESETS: dict[str, dict[str, Any]] = {name: {} for name in ("off", "paper", "guarded", "certified", "adaptive")}
PRESETS |= {f"adaptive, every {n}th token": {"select_every": n} for n in (4, 8, 16)}
QUEST = {  # the share of blocks read, and tokens a selection
    "quest 1/8": (0.125, 1),
    "quest 1/8, every 16th token": (0.125, 16),
    "quest 1/4, every 16th token": (0.25, 16),
}
ARMS = (*PRESETS, *QUEST)


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model("smollm2")
    text: Path = experiment.text()
    contexts: tuple[int, ...] = setting((2048, 4096, 7680), "tokens of the prompt", least=2, quick=(120,))
    controls: tuple[str, ...] = setting(ARMS, "presets and shares", choices=ARMS, quick=("off", "quest 1/8"))
    tokens: int = setting(64, "new tokens", least=2, quick=8)
    rounds: int = setting(3, "rounds in which the arms take turns", least=2, quick=2)


def controller(name: str) -> Controller:
    """Return the controller of an arm, which chooses blocks at every length."""
    if name in PRESETS:
        least = {} if name == "off" else {"min_context": 0}
        return preset(name.partition(",")[0], **PRESETS[name], **least)
    share, interval = QUEST[name]
    return reading(quest, share, refresh.Every(interval))


def decoding(model: Model, name: str, prompt: list[int], tokens: int) -> Round:
    """Return a round of new tokens after a prompt, under the controller of an arm."""
    control = controller(name)

    def timed() -> dict[str, float]:
        first, trace = 0.0, ()
        for event in model.stream([prompt], max_tokens=tokens, temperature=0.0, ignore_eos=True, control=control):
            first = first or time.perf_counter()
            trace = event.completion.trace if event.completion else ()
        milliseconds = 1e3 * (time.perf_counter() - first) / (tokens - 1)
        read, held = sum(row.blocks_read for row in trace), sum(row.blocks_held for row in trace)
        moved = sum((row.share_bytes or 0.0) * row.blocks_held for row in trace)
        return {"milliseconds": milliseconds, "share_read": read / held, "share_bytes": moved / held}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context."""
    longest = max(settings.contexts) + settings.tokens
    model = load(settings.model, max_num_seqs=1, max_model_len=longest)
    text = "\n\n".join(texts(settings.text))[: LONGEST_TOKEN * longest]
    tokens = model.tokenizer.encode(text)
    if len(tokens) < longest:
        raise UsageError(f"--text has {len(tokens)} tokens and {longest} are wanted; give a longer one.")
    for context in settings.contexts:
        prompt = tokens[:context]
        arms = {name: partial(decoding, model, name, prompt, settings.tokens) for name in settings.controls}
        yield Group(labels={"tokens": context}, arms=arms, baseline="off", rounds=settings.rounds)


FIGURES = {
    "milliseconds": Figure(header="ms a token", against="ratio"),
    "share_read": Figure(header="blocks read"),
    "share_bytes": Figure(header="bytes moved"),
}

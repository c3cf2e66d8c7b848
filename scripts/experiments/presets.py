"""Does reading a part of the blocks save time on a real model, by the length of the context?

The model continues parts of a text greedily, one sequence at a time or several, and the arms take turns: presets, which
select blocks at every token, `adaptive` that selects them at every 4th to 16th, and Quest, which reads a fixed share of
them and selects at every token or at every 16th. Each chooses blocks at every length. Counted is the time from where
all sequences have a new token to the last token, with traces, divided by the tokens of all sequences in it.
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
from et_jax.serve.completions import TokenTrace
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
    sequences: int = setting(1, "sequences at a time", least=1, quick=2)
    tokens: int = setting(64, "new tokens of each", least=2, quick=8)
    rounds: int = setting(3, "rounds in which the arms take turns", least=2, quick=2)


def controller(name: str) -> Controller:
    """Return the controller of an arm, which chooses blocks at every length."""
    if name in PRESETS:
        least = {} if name == "off" else {"min_context": 0}
        return preset(name.partition(",")[0], **PRESETS[name], **least)
    share, interval = QUEST[name]
    return reading(quest, share, refresh.Every(interval))


def decoding(model: Model, name: str, prompts: list[list[int]], tokens: int) -> Round:
    """Return a round of new tokens after each prompt, under the controller of an arm."""
    control = controller(name)

    def timed() -> dict[str, float]:
        start, produced = 0.0, 0
        begun = set[int]()
        trace: list[TokenTrace] = []
        for event in model.stream(prompts, max_tokens=tokens, temperature=0.0, ignore_eos=True, control=control):
            begun.add(event.prompt_index)
            if start:
                produced += 1
            elif len(begun) == len(prompts):
                start = time.perf_counter()
            trace += event.completion.trace if event.completion else ()
        milliseconds = 1e3 * (time.perf_counter() - start) / produced
        read, held = sum(row.blocks_read for row in trace), sum(row.blocks_held for row in trace)
        moved = sum((row.share_bytes or 0.0) * row.blocks_held for row in trace)
        return {"milliseconds": milliseconds, "share_read": read / held, "share_bytes": moved / held}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context."""
    longest = max(settings.contexts) + settings.tokens
    model = load(settings.model, max_num_seqs=settings.sequences, max_model_len=longest)
    wanted = longest * settings.sequences
    tokens = model.tokenizer.encode("\n\n".join(texts(settings.text))[: LONGEST_TOKEN * wanted])
    if len(tokens) < wanted:
        raise UsageError(f"--text has {len(tokens)} tokens and {wanted} are wanted; give a longer one.")
    for context in settings.contexts:
        prompts = [tokens[begin : begin + context] for begin in range(0, context * settings.sequences, context)]
        arms = {name: partial(decoding, model, name, prompts, settings.tokens) for name in settings.controls}
        yield Group(
            labels={"tokens": context, "sequences": settings.sequences},
            arms=arms,
            baseline="off",
            rounds=settings.rounds,
        )


FIGURES = {
    "milliseconds": Figure(header="ms a token", against="ratio"),
    "share_read": Figure(header="blocks read"),
    "share_bytes": Figure(header="bytes moved"),
}

"""Does a preset that reads a part of the blocks save time on a real model, by the length of the context?

The model continues parts of a text greedily. The presets take turns, and each chooses blocks at every length. What is
timed is `Model.generate`, less its first two tokens, so that what a prompt takes is left out.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from et_jax.control.presets import preset
from et_jax.errors import UsageError
from et_jax.serve.completions import TokenTrace
from et_jax.serve.engine import load
from et_jax.serve.model import Model
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.text import texts
from scripts.measuring.timing import Round

FEWEST = 2  # tokens of the call that is subtracted, with its prefill
LONGEST_TOKEN = 16  # characters of a token, which few have
ARMS = ("off", "paper", "guarded", "certified", "adaptive")


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model("smollm2")
    text: Path = experiment.text()
    contexts: tuple[int, ...] = setting((2048, 4096, 7680), "tokens of the prompt", least=2, quick=(120,))
    controls: tuple[str, ...] = setting(ARMS, "presets", choices=ARMS, quick=("off", "paper"))
    sequences: int = setting(1, "parts of the text, continued together", least=1)
    tokens: int = setting(64, "new tokens", least=3, quick=8)
    rounds: int = setting(3, "rounds in which the presets take turns", least=2, quick=2)


def decoding(model: Model, name: str, prompts: list[list[int]], tokens: int) -> Round:
    """Return a round of new tokens after prompts, under a preset."""
    control = preset(name) if name == "off" else preset(name, min_context=0)

    def generated(count: int) -> tuple[float, list[TokenTrace]]:
        began = time.perf_counter()
        done = model.generate(prompts, max_tokens=count, temperature=0.0, ignore_eos=True, control=control)
        return time.perf_counter() - began, [row for one in done for row in one.trace[FEWEST:]]

    def timed() -> dict[str, float]:
        (few, _), (many, rows) = generated(FEWEST), generated(tokens)
        share = sum(row.blocks_read for row in rows) / sum(row.blocks_held for row in rows)
        return {"milliseconds": 1e3 * (many - few) / (tokens - FEWEST), "share_read": share}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context."""
    rows, longest = settings.sequences, max(settings.contexts)
    model = load(settings.model, max_num_seqs=rows, max_model_len=longest + settings.tokens)
    text = "\n\n".join(texts(settings.text))[: LONGEST_TOKEN * longest * rows]
    tokens = model.tokenizer.encode(text)
    if len(tokens) < longest * rows:
        raise UsageError(f"--text has {len(tokens)} tokens and {longest * rows} are wanted; give a longer one.")
    for context in settings.contexts:
        prompts = [tokens[row * longest :][:context] for row in range(rows)]
        arms = {name: partial(decoding, model, name, prompts, settings.tokens) for name in settings.controls}
        yield Group(
            labels={"sequences x tokens": f"{rows} x {context}"}, arms=arms, baseline="off", rounds=settings.rounds
        )


FIGURES = {
    "milliseconds": Figure(header="ms a token", against="ratio"),
    "share_read": Figure(header="blocks read"),
}

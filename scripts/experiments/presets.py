"""Does reading a part of the blocks save time on a real model, by the length of the context?

The decoder's step continues parts of a text, one sequence or several, and the arms take turns: presets, which select
blocks at every token, `adaptive` that selects them at every 4th to 16th, and Quest at a share of the blocks. Tokens are
drawn at temperature 1: a greedy text soon repeats itself, and presets read little where entropy is low.
Each selects at every length. A prompt is read once for each arm; every round continues where the last one ended.
Counted is the time of a burst of steps, divided by the tokens of all sequences in it.
"""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.decode.plant import costs
from et_jax.errors import UsageError
from et_jax.scope import own_settings
from et_jax.serve.engine import load
from et_jax.serve.model import Model
from scripts.measuring import experiment
from scripts.measuring.experiment import Base, Figure, Group, setting
from scripts.measuring.selectors import keeping, quest, reading
from scripts.measuring.states import prefilled
from scripts.measuring.text import texts
from scripts.measuring.timing import Round

LONGEST_TOKEN = 16  # characters of a token, which few have
PRESETS: dict[str, dict[str, Any]] = {name: {} for name in ("off", "paper", "guarded", "certified", "adaptive")}
PRESETS |= {f"share 1/{n}": {"tolerance": 1 - 1 / n} for n in (4, 8)}
KEPT = {f"adaptive, every {n}th token": n for n in (4, 8, 16)}
QUEST = {"quest 1/4": 0.25, "quest 1/8": 0.125}
ARMS = (*PRESETS, *KEPT, *QUEST)


class Settings(Base):
    """Flags of the experiment."""

    model: str = experiment.model("smollm2")
    text: Path = experiment.text()
    contexts: tuple[int, ...] = setting((2048, 4096, 7680), "tokens of the prompt", least=2, quick=(120,))
    controls: tuple[str, ...] = setting(ARMS, "presets and shares", choices=ARMS, quick=("off", "quest 1/8"))
    sequences: int = setting(1, "sequences at a time", least=1, quick=2)
    tokens: int = setting(16, "new tokens of each in a round", least=2, quick=8)
    rounds: int = setting(15, "rounds in which the arms take turns", least=2, quick=2)


def controller(name: str) -> Controller:
    """Return the controller of an arm, which selects blocks at every length."""
    if name in QUEST:
        return reading(quest, QUEST[name])
    if name in KEPT:
        return keeping(preset("adaptive"), KEPT[name])
    return preset(name.partition(" ")[0], **PRESETS[name])


@own_settings()
def decoding(model: Model, name: str, prompts: list[list[int]], tokens: int, seed: int) -> Round:
    """Return a round of new tokens after each prompt, under the controller of an arm."""
    bound = model.decoder(controller(name))
    state = prefilled(bound, model.weights, prompts, limit=2**30, temperature=1.0, seed=seed)
    price = costs(bound.config.plants, model.weights, state.plants, bound.config.by_mass_of)[0]
    heads = bound.config.model.num_layers * bound.config.model.num_kv_heads
    held = [state]

    @own_settings()
    def timed() -> dict[str, float]:
        taken, read, scored, blocks, left = 0.0, 0.0, 0.0, 0.0, tokens
        while left:
            began = time.perf_counter()
            held[0], output, ran = jax.block_until_ready(bound.decode(model.weights, held[0], left))
            taken += time.perf_counter() - began
            signals = jax.tree.map(lambda x, ran=ran: x[:ran], output.signals)
            read += float(jnp.sum(signals.blocks_read))
            scored += float(jnp.sum(signals.summaries_read))
            blocks += float(jnp.sum(signals.allocated_pages)) * heads
            left -= int(ran)
        return {
            "milliseconds": 1e3 * taken / (tokens * len(prompts)),
            "share_read": read / blocks,
            "share_bytes": (read * price.block + scored * price.summary) / (blocks * price.block),
        }

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context."""
    longest = max(settings.contexts) + settings.tokens * (settings.rounds + 1)
    model = load(settings.model, max_num_seqs=settings.sequences, max_model_len=longest)
    wanted = longest * settings.sequences
    tokens = model.tokenizer.encode("\n\n".join(texts(settings.text))[: LONGEST_TOKEN * wanted])
    if len(tokens) < wanted:
        raise UsageError(f"--text has {len(tokens)} tokens and {wanted} are wanted; give a longer one.")
    for context in settings.contexts:
        prompts = [tokens[begin : begin + context] for begin in range(0, context * settings.sequences, context)]
        arms = {
            name: partial(decoding, model, name, prompts, settings.tokens, settings.seed) for name in settings.controls
        }
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

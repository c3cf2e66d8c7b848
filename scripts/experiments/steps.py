"""What does choosing blocks save of the time of a decode step and of a prompt's prefill?

A random model, by default in the shape of SmolLM-135M, decodes greedily from caches of random tokens, of whose keys
one in 256 is 24 times as long, so that few blocks have most of the mass. A model that is random is never certain, so
the tolerances are constant: those at which a context of 2,048 tokens has 6 to 9% of its blocks read. Quest reads the
share `--quest`. A prompt is read densely, and with budgets of so many tokens of the context before each segment.
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from et_jax.control.base import chain
from et_jax.control.budget import ConstantBudget
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.priority import EntropyDrift
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.tolerance import Constant
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.serve.engine import load
from et_jax.types import replace
from scripts.measuring.experiment import Figure, Group, setting
from scripts.measuring.random_folder import random_folder
from scripts.measuring.selectors import guarded, quest
from scripts.measuring.shapes import Shaped, even_heads
from scripts.measuring.states import filled, whole_context, with_random_pages
from scripts.measuring.timing import Round, seconds

TOLERANCES = {"paper": 0.05, "guarded": 0.05, "certified": 0.9, "adaptive": 0.1}
ARMS = ("off", "quest", *TOLERANCES)


@dataclass(frozen=True, kw_only=True)
class Settings(Shaped):
    """Flags of the experiment."""

    contexts: tuple[int, ...] = setting((128, 512, 2048, 8192, 16_384), "tokens of a row", least=1, quick=(200,))
    rows: tuple[int, ...] = setting((2, 16), "rows of a step", least=2, quick=(2,))
    controls: tuple[str, ...] = setting(ARMS, "ways of choosing", choices=ARMS, quick=("off", "quest", "certified"))
    quest: float = setting(1 / 8, "share of the blocks that Quest reads", least=0.0, most=1.0)
    steps: int = setting(16, "steps of a round", least=1, quick=2)
    prompt: int = setting(16_384, "tokens of the prompt", least=2, quick=300)
    budgets: tuple[int, ...] = setting((8192, 4096, 2048, 1024), "tokens that a head reads", least=1, quick=(128,))
    segment: int = setting(512, "tokens of a segment of the prompt", least=1, quick=64)


def controller(name: str, share: float) -> Controller:
    """Return a way of choosing at a constant tolerance."""
    if name == "off":
        return preset("off")
    chosen = guarded(quest) if name == "quest" else preset(name, min_context=0)
    tolerance = Constant(TOLERANCES.get(name, share))
    return replace(chosen, law=chain(EmaEntropy(), FallClock(), tolerance, EntropyDrift()))


def decoding(config: DecoderConfig, params: Params, context: int) -> Round:
    """Return a round of steps after a context, and after a step that reads every block of it."""
    run, steps = jax.jit(partial(decode, config), donate_argnums=1), config.max_steps
    heads = config.model.num_layers * config.model.num_kv_heads

    def timed() -> dict[str, float]:
        begun = with_random_pages(config, filled(config, context, 0.0), outstanding=1 / 256, longer=24.0)
        begun, done = jax.block_until_ready(run((params,), begun, jnp.int32(1))[0]), []
        took = seconds(lambda: done.append(run((params,), begun, jnp.int32(steps))) or done[0])
        signals = done[0][1].signals
        read, pages = (float(jnp.sum(of[:steps])) for of in (signals.blocks_read, signals.pages_held))
        return {"milliseconds": 1e3 * took, "share_read": read / (pages * heads)}

    return timed


def reading(settings: Settings, folder: Path, budget: int | None) -> Round:
    """Return the prefill of the prompt, from an empty cache."""
    how = None if budget is None else ConstantBudget(segment=settings.segment, dense_layers=0, tokens=budget)
    model = load(str(folder), dtype="bfloat16", max_num_seqs=1, prefix_cache=False, control=Controller(budget=how))
    prompt = np.random.default_rng(settings.seed).integers(1, 4000, settings.prompt).tolist()
    return lambda: {"milliseconds": 1e3 * seconds(lambda: model.generate([prompt], max_tokens=1) and None)}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context and number of rows, and one for the prompt."""
    params = initialise(settings.model_of(1), jax.random.key(settings.seed), jnp.bfloat16)
    for context in settings.contexts:
        model = settings.model_of(context + 2 * settings.steps)
        for rows in settings.rows:
            config = whole_context(model, rows, "bfloat16", max_steps=settings.steps, calibration=even_heads(model))
            under = {
                name: dataclasses.replace(config, controller=controller(name, settings.quest))
                for name in settings.controls
            }
            arms = {name: partial(decoding, one, params, context) for name, one in under.items()}
            yield Group(
                labels={"what": f"{settings.steps} steps", "tokens": context, "rows": rows},
                arms=arms,
                baseline="off",
                rounds=settings.rounds,
            )
            jax.clear_caches()
    with tempfile.TemporaryDirectory() as name:
        folder = random_folder(Path(name), settings.model_of(settings.prompt + 64), jnp.bfloat16)
        arms = {"off": partial(reading, settings, folder, None)}
        arms |= {f"{budget} tokens": partial(reading, settings, folder, budget) for budget in settings.budgets}
        labels = {"what": "prefill", "tokens": settings.prompt, "rows": 1}
        yield Group(labels=labels, arms=arms, baseline="off", rounds=settings.rounds)


FIGURES = {
    "milliseconds": Figure(header="ms", against="ratio"),
    "share_read": Figure(header="blocks read"),
}

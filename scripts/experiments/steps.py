"""What a decode step takes under each way of choosing blocks, over one that reads everything, at any context.

A random model, by default in the shape of SmolLM-135M, decodes greedily from caches of random tokens, of whose keys
one in 256 is 24 times as long, so that few blocks have most of the mass. A model that is random is never certain, so
the tolerances are constant: those at which a context of 2,048 tokens has 6 to 9% of its blocks read. Quest reads the
share `--quest`. All arms use one cache in turns, so that the largest contexts fit. On a busy machine `--cpu-time`
counts what the processor did on all its cores, not the time that passed.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from et_jax.control import select
from et_jax.control.base import chain
from et_jax.control.clock import FallClock
from et_jax.control.controller import Controller
from et_jax.control.presets import preset
from et_jax.control.priority import EntropyDrift
from et_jax.control.smoothing import EmaEntropy
from et_jax.control.tolerance import Constant
from et_jax.control.view import BlockView
from et_jax.decode import cache as kv
from et_jax.decode.cache import KVCache, LayerCache
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode
from et_jax.decode.plant import PlantState
from et_jax.decode.state import DecodeState
from et_jax.models.calibration import Calibration
from et_jax.models.transformer import initialise
from et_jax.types import Table, replace
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.shapes import SHAPES, shaped
from scripts.measuring.states import filled, whole_context
from scripts.measuring.timing import Round, seconds

TOLERANCES = {"paper": 0.05, "guarded": 0.05, "certified": 0.9, "adaptive": 0.1}
ARMS = ("off", "quest", *TOLERANCES)
OUTSTANDING, LONGER = 1 / 256, 24.0
PIECE = 256  # tokens written in a call


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    contexts: tuple[int, ...] = setting((128, 512, 2048, 8192, 16_384), "tokens of a row", least=1, quick=(200,))
    rows: tuple[int, ...] = setting((2, 16), "rows of a step", least=2, quick=(2,))
    controls: tuple[str, ...] = setting(ARMS, "ways of choosing", choices=ARMS, quick=("off", "quest", "certified"))
    quest: float = setting(1 / 8, "share of the blocks that Quest reads", least=0.0, most=1.0)
    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    dtype: str = setting("bfloat16", "of weights and cache", choices=("bfloat16", "float32"))
    steps: int = setting(16, "steps of a round", least=1, quick=2)
    cpu_time: bool = setting(False, "count processor time of all cores, not time that passes")
    rounds: int = setting(7, "rounds in which all take turns", least=2, quick=2)


def quest(view: BlockView) -> Bool[Array, " n"]:
    """Return Quest's blocks, a share `tolerance` of all."""
    blocks = jnp.sum(view.num_tokens > 0, dtype=jnp.float32)
    return select.Quest(jnp.round(view.tolerance * blocks).astype(jnp.int32))(view)


def controller(name: str, share: float) -> Controller:
    """Return a way of choosing at a constant tolerance."""
    if name == "off":
        return preset("off")
    tolerance = share if name == "quest" else TOLERANCES[name]
    law = chain(EmaEntropy(), FallClock(), Constant(tolerance), EntropyDrift())
    if name == "quest":
        return Controller(law=law, selector=select.Guarded(quest, sinks=1, window=1, min_blocks=0))
    return replace(preset(name, min_context=0), law=law)


class Shared:
    """A random model and one cache of random tokens, which the arms use in turns."""

    def __init__(self, settings: Settings, rows: int, context: int) -> None:
        room = -(-(context + 2 * settings.steps) // PIECE) * PIECE
        model = shaped(settings.shape, settings.layers, room)
        heads = np.ones((model.num_layers, model.num_kv_heads, model.group_size), np.float32)
        calibration = Calibration(sensitivity=Table(heads))
        self.config = whole_context(model, rows, settings.dtype, max_steps=settings.steps, calibration=calibration)
        self.params = initialise(model, jax.random.key(settings.seed), settings.dtype)
        self.cache = stored(self.config)
        self.settings, self.context = settings, context

    def started(self, name: str) -> Round:
        """Return what runs the steps from the same state on; the first step reads every block."""
        steps, share = self.settings.steps, self.settings.quest
        config = dataclasses.replace(self.config, controller=controller(name, share))
        begun = jax.jit(lambda: replace(filled(config, self.context, 0.0), plants=()))()
        run = jax.jit(partial(decode, config), donate_argnums=1)
        copy = jax.jit(partial(jax.tree.map, jnp.copy))
        clock = time.process_time if self.settings.cpu_time else time.perf_counter

        def run_from(state: DecodeState, count: int) -> tuple[DecodeState, Any, float]:
            lent = PlantState(cache=self._lent(config), num_cached=jnp.copy(state.length))
            own, done = jax.block_until_ready(replace(copy(state), plants=(lent,))), []
            took = seconds(lambda: done.append(run((self.params,), own, jnp.int32(count))) or done[0], clock)
            state, output, _ = done[0]
            self._take_back(state.plants[0].cache)
            return replace(state, plants=()), output, took

        begun, _, _ = run_from(begun, 1)
        heads = config.model.num_layers * config.model.num_kv_heads

        def timed() -> dict[str, float]:
            _, output, took = run_from(begun, steps)
            read, pages = (float(jnp.sum(getattr(output.signals, of)[:steps])) for of in ("blocks_read", "pages_held"))
            return {"milliseconds": 1e3 * took / steps, "share_read": read / (pages * heads)}

        return timed

    def _lent(self, config: DecoderConfig) -> KVCache:
        """Return the cache without what a configuration does not keep."""
        without = {"summary": "summaries", "key_codes": "codes"}
        absent = {name: None for name, kept in without.items() if kept not in config.keeps}
        return KVCache(layers=tuple(replace(layer, **absent) for layer in self.cache.layers), surprisal=None)

    def _take_back(self, cache: KVCache) -> None:
        def both(old: LayerCache, new: LayerCache) -> LayerCache:
            given = {name: getattr(new, name) for name in ("pages", "summary", "key_codes")}
            return replace(old, **{name: part for name, part in given.items() if part is not None})

        layers = tuple(both(*each) for each in zip(self.cache.layers, cache.layers, strict=True))
        self.cache = KVCache(layers=layers, surprisal=None)


def stored(config: DecoderConfig) -> KVCache:
    """Return a cache in which slots have as many random tokens as fit, with all summaries, alike in all layers."""
    model, rows, size = config.model, config.num_slots, config.page_size
    k, d = model.num_kv_heads, model.head_dim
    [layer] = kv.empty(1, k, d, config.num_pages, size, config.cache_dtype, key_codes=True).layers
    table = jnp.arange(1, rows * config.blocks_per_slot + 1, dtype=jnp.int32).reshape(rows, -1)

    def piece(layer: LayerCache, key: Array, start: Array) -> LayerCache:
        keys, values, which = jax.random.split(key, 3)
        shape = rows, PIECE, k, d
        outstanding = jax.random.uniform(which, (*shape[:3], 1)) < OUTSTANDING
        drawn = jax.random.normal(keys, shape) * jnp.where(outstanding, LONGER, 1.0)
        count = jnp.full(rows, PIECE, jnp.int32)
        return kv.write(layer, drawn, jax.random.normal(values, shape), table, jnp.full(rows, start), count)

    write_piece = jax.jit(piece, donate_argnums=0)
    for index in range(config.max_length // PIECE):
        layer = write_piece(layer, jax.random.key(index), jnp.int32(index * PIECE))
    copy = jax.jit(partial(jax.tree.map, jnp.copy))
    return KVCache(layers=(layer, *(copy(layer) for _ in range(model.num_layers - 1))), surprisal=None)


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context and number of rows."""
    for context in settings.contexts:
        for rows in settings.rows:
            shared = Shared(settings, rows, context)
            arms: dict[str, Callable[[], Round]] = {name: partial(shared.started, name) for name in settings.controls}
            labels = {"context": context, "rows": rows}
            yield Group(labels=labels, arms=arms, baseline="off", rounds=settings.rounds)
            jax.clear_caches()


EXPERIMENT = Experiment(
    question="What does a decode step take under each way of choosing blocks, over one that reads everything?",
    settings=Settings,
    groups=groups,
    figures={
        "milliseconds": Figure(header="ms a step", against="ratio"),
        "share_read": Figure(header="blocks read"),
    },
    timed=True,
)

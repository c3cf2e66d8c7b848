"""Where the time of one decode step goes, by taking parts away.

Every arm runs as a loop on the device, as `decode` does, so that the host is not measured. From first to last each has
the parts of the one before it and one more: `weight products`, every weight matrix times as many rows, which a step
cannot go below; `forward`, the transformer without attention; `+ cache write`, keys and values into their pages;
`+ attention`; `step`, with the signals (entropy and varentropy), sampling and page table; `+ all laws`, with a law of
every kind. On a busy machine use `--cpu-time` under `taskset -c 0`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from et_jax.control import clock, guards, priority, smoothing, temperature, tolerance
from et_jax.control.base import chain
from et_jax.control.controller import Controller
from et_jax.decode import cache as kv
from et_jax.decode.cache import KVCache
from et_jax.decode.config import DecoderConfig
from et_jax.decode.rows import Rows
from et_jax.decode.state import DecodeState
from et_jax.decode.step import extend_rows, step
from et_jax.models.checkpoint import read_config
from et_jax.models.hub import resolve
from et_jax.models.params import Params
from et_jax.models.transformer import Attend, forward, initialise
from et_jax.models.weights import Weight, nodes
from et_jax.softmax import Softmax
from et_jax.types import replace
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.shapes import SHAPES, shaped
from scripts.measuring.states import filled, whole_context
from scripts.measuring.timing import Round, seconds

KINDS = ("weight products", "forward", "+ cache write", "+ attention", "step", "+ all laws")


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    model: str = setting("", "a model, by name or folder, whose shape is taken instead")
    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    batches: tuple[int, ...] = setting((2, 16), "rows of a step", least=2, quick=(2,))
    dtypes: tuple[str, ...] = setting(("bfloat16",), "of weights and cache", choices=("bfloat16", "float32"))
    context: int = setting(64, "tokens in every sequence at the start", least=1, quick=8)
    steps: int = setting(16, "steps of a round", least=1, quick=2)
    temperatures: tuple[float, ...] = setting((0.0,), "of sampling, 0 for greedy", least=0.0)
    cpu_time: bool = setting(False, "count processor time of all cores, not time that passes")
    rounds: int = setting(7, "rounds in which all take turns", least=2, quick=2)


def all_laws() -> Controller:
    """Return a controller with a law of every kind."""
    heat = guards.Stability(guards.Saturation(temperature.DampedThermostat(2.0), "temperature", 0.1, 2.0), 1.0)
    least = guards.Floored(tolerance.EntropyTolerance(), 0.1)
    return Controller(law=chain(smoothing.EmaEntropy(), clock.FallClock(), heat, least, priority.EntropyDrift()))


def without_attention(write: bool, table: Array, length: Array, run: Array) -> Attend:
    """Return an `attend` that reads nothing and may write; keys and values flow on, lest XLA drop their products."""

    def attend(layer: int, q: Array, k: Array, v: Array, memory: KVCache, softmax: Softmax) -> tuple[Array, KVCache]:
        if write:
            cached = kv.write(memory.layers[layer], k, v, table, length, run.astype(jnp.int32))
            memory = kv.with_place(memory, layer, cached)
        return q + jnp.repeat(k + v, q.shape[2] // k.shape[2], axis=2), memory

    return attend


def advance(kind: str, config: DecoderConfig, params: Params, state: DecodeState) -> DecodeState:
    """Return the state after one step of a kind; what would be dead code there is kept alive."""
    if kind in ("step", "+ all laws"):
        return step(config, (params,), state)[0]
    if kind == "weight products":
        return replace(state, token=products(params, state.token))
    length, run = state.length, state.active
    if kind == "+ attention":
        rows = Rows(slot=None, token=state.token, position=length, run=run)
        after, logits, stats = extend_rows(config, (params,), state, rows, length + 1)
        after = replace(after, control=replace(after.control, block_mask=stats.block_masks))
        return replace(after, token=some_token(logits), length=length + 1)
    own, asked = state.plants[0], (state.token[:, None], length[:, None])
    attend = without_attention(kind == "+ cache write", state.table.pages, length, run)
    logits, cache = forward(params, config.model, *asked, attend, own.cache)
    after = state.with_plant(0, replace(own, cache=cache))
    return replace(after, token=some_token(logits[:, 0]), length=length + 1)


def products(params: Params, token: Array) -> Array:
    """Return tokens that need the product of every weight matrix with rows of a token's embedding."""
    x = y = params.embedding.rows(token)
    matrices = [node for node in nodes(params.layers) if isinstance(node, Weight)]
    for matrix in [*matrices, params.embedding if params.head is None else params.head]:
        rows = jnp.tile(x, (1, -(-matrix.shape[1] // x.shape[1])))[:, : matrix.shape[1]]
        y = matrix.matmul(rows)
        x = x + (1e-6 * y[:, :1]).astype(x.dtype)  # the next product waits for this one, as in the model
    return some_token(y)


def some_token(logits: Array) -> Array:
    """Return a token that needs every logit and costs next to nothing."""
    return (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)


def started(kind: str, heat: float, config: DecoderConfig, params: Params, settings: Settings) -> Round:
    """Return the jitted loop over steps of a kind, each round from the same state."""
    config = dataclasses.replace(config, controller=all_laws()) if kind == "+ all laws" else config
    begin = jax.jit(partial(filled, config, settings.context, heat))

    def loop(params: Params, state: DecodeState, num_steps: Array) -> DecodeState:
        return jax.lax.fori_loop(0, num_steps, lambda _, state: advance(kind, config, params, state), state)

    run = jax.jit(loop, donate_argnums=1)
    clock = time.process_time if settings.cpu_time else time.perf_counter

    def timed() -> dict[str, Any]:
        state = jax.block_until_ready(begin())
        took = seconds(lambda: run(params, state, jnp.int32(settings.steps)), clock)
        return {"milliseconds": 1e3 * took / settings.steps}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each dtype, batch and temperature."""
    model = shaped(settings.shape, settings.layers, settings.context + 2 * settings.steps)
    model = read_config(resolve(settings.model)) if settings.model else model
    for dtype in settings.dtypes:
        params = initialise(model, jax.random.key(0), dtype)
        for batch, heat in itertools.product(settings.batches, settings.temperatures):
            config = whole_context(model, batch, dtype, max_steps=settings.steps)
            arms: dict[str, Callable[[], Round]] = {
                kind: partial(started, kind, heat, config, params, settings) for kind in KINDS
            }
            labels = {"dtype": dtype, "batch": batch, "temperature": heat}
            yield Group(labels=labels, arms=arms, baseline="step", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="Where does the time of one decode step go, by taking parts away?",
    settings=Settings,
    groups=groups,
    figures={"milliseconds": Figure(header="ms a step", against="ratio")},
    timed=True,
)

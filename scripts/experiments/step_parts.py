"""Where does the time of one decode step go, by taking parts away?

Every arm runs as a loop on the device, as `decode` does, so that the host is not measured. From first to last each has
the parts of the one before it and one more: `forward`, the transformer without attention; `+ cache write`, keys and
values into their pages; `+ attention`; `step`, with the signals (entropy and varentropy), sampling and page table;
`+ all laws`, with a law of every kind.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

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
from et_jax.models.params import Params
from et_jax.models.transformer import Attend, forward, initialise
from et_jax.softmax import Softmax
from et_jax.types import replace
from scripts.measuring.experiment import Figure, Group, setting
from scripts.measuring.shapes import Shaped
from scripts.measuring.states import filled, whole_context
from scripts.measuring.timing import Round, seconds

KINDS = ("forward", "+ cache write", "+ attention", "step", "+ all laws")


@dataclass(frozen=True, kw_only=True)
class Settings(Shaped):
    """Flags of the experiment."""

    batches: tuple[int, ...] = setting((2, 16), "rows of a step", least=2, quick=(2,))
    context: int = setting(64, "tokens in every sequence at the start", least=1, quick=8)
    steps: int = setting(16, "steps of a round", least=1, quick=2)


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
    length, run = state.length, state.active
    if kind == "+ attention":
        rows = Rows(slot=None, token=state.token, position=length, run=run)
        after, logits, stats = extend_rows(config, (params,), state, rows, length + 1)
        after = replace(after, control=replace(after.control, block_mask=stats.block_masks))
    else:
        own, asked = state.plants[0], (state.token[:, None], length[:, None])
        attend = without_attention(kind == "+ cache write", state.table.pages, length, run)
        logits, cache = forward(params, config.model, *asked, attend, own.cache)
        after, logits = state.with_plant(0, replace(own, cache=cache)), logits[:, 0]
    some_token = (jnp.max(logits, axis=-1) > 0).astype(jnp.int32)  # needs every logit, and costs next to nothing
    return replace(after, token=some_token, length=length + 1)


def started(kind: str, config: DecoderConfig, params: Params, context: int) -> Round:
    """Return the jitted loop over steps of a kind, each round from the same state."""
    config = dataclasses.replace(config, controller=all_laws()) if kind == "+ all laws" else config
    begin = jax.jit(partial(filled, config, context, 0.0))

    def loop(params: Params, state: DecodeState, num_steps: Array) -> DecodeState:
        return jax.lax.fori_loop(0, num_steps, lambda _, state: advance(kind, config, params, state), state)

    run = jax.jit(loop, donate_argnums=1)

    def timed() -> dict[str, float]:
        state = jax.block_until_ready(begin())
        took = seconds(lambda: run(params, state, jnp.int32(config.max_steps)))
        return {"milliseconds": 1e3 * took / config.max_steps}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each batch."""
    model = settings.model_of(settings.context + 2 * settings.steps)
    params = initialise(model, jax.random.key(0), jnp.bfloat16)
    for batch in settings.batches:
        config = whole_context(model, batch, "bfloat16", max_steps=settings.steps)
        arms = {kind: partial(started, kind, config, params, settings.context) for kind in KINDS}
        yield Group(labels={"batch": batch}, arms=arms, baseline="step", rounds=settings.rounds)


FIGURES = {"milliseconds": Figure(header="ms a step", against="ratio")}

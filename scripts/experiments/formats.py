"""What weights and caches in 8 bits save of the time of steps and of prefill.

Random weights, by default in the shape of SmolLM-135M, as bfloat16 and int8, with caches in bfloat16 and 8 bits.
Decode steps of rows that have so many tokens in the cache, many steps in one call, and one call that prefills a
prompt.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from et_jax.decode import eight_bits
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode
from et_jax.decode.prefill import prefill
from et_jax.decode.state import empty
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.models.weights import quantized
from et_jax.types import replace
from scripts.measuring.experiment import Base, Experiment, Figure, Group, setting
from scripts.measuring.shapes import SHAPES, shaped
from scripts.measuring.states import filled, whole_context
from scripts.measuring.timing import Round, seconds

FORMS = {  # of the weights and of the cache
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8 weights": ("int8", "bfloat16"),
    **{f"{kind} cache": ("bfloat16", kind) for kind in eight_bits.NAMED_8_BITS},
    "int8 weights and cache": ("int8", "int8"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    """Flags of the experiment."""

    contexts: tuple[int, ...] = setting((64, 2048, 8192, 16_384), "tokens of a row", least=1, quick=(64,))
    rows: tuple[int, ...] = setting((2, 16), "rows of a step", least=2, quick=(2,))
    prompts: tuple[int, ...] = setting((512,), "tokens of a call that prefills, pages of them", quick=(64,))
    shape: str = setting("smollm-135m", "shape of the random model", choices=tuple(SHAPES), quick="small")
    layers: int = setting(0, "layers of the shape, 0 for all", least=0)
    steps: int = setting(16, "steps of a round", least=1, quick=2)
    rounds: int = setting(7, "rounds in which all take turns", least=2, quick=2)


def configured(settings: Settings, rows: int, length: int, cache: str) -> DecoderConfig:
    """Return a decoder whose rows have room for so many tokens, in a cache of a kind."""
    model = shaped(settings.shape, settings.layers, length)
    config = whole_context(model, rows, "bfloat16", max_steps=settings.steps)
    return replace(config, cache_dtype=eight_bits.dtype_named(cache), dtype="bfloat16")


def decoding(weights: Params, config: DecoderConfig, context: int, steps: int) -> Round:
    """Return what decodes from the same state on."""
    run = jax.jit(partial(decode, config), donate_argnums=1)
    begin = jax.jit(partial(filled, config, context, 1.0))

    def timed() -> dict[str, float]:
        state = jax.block_until_ready(begin())
        took = seconds(lambda: run((weights,), state, jnp.int32(steps)))
        return {"tokens_per_second": config.num_slots * steps / took}

    return timed


def reading(weights: Params, config: DecoderConfig, tokens: int) -> Round:
    """Return what prefills a prompt in one call."""
    config = replace(config, prefill_batch=tokens)
    begin, read = jax.jit(partial(empty, config)), jax.jit(partial(prefill, config), donate_argnums=1)
    count = tokens // config.chunk
    rows, prompt = jnp.zeros(count, jnp.int32), jnp.arange(tokens, dtype=jnp.int32).reshape(count, config.chunk)

    def timed() -> dict[str, float]:
        state = jax.block_until_ready(begin())
        took = seconds(lambda: read((weights,), state, rows, prompt, rows + config.chunk, rows < 0))
        return {"tokens_per_second": tokens / took}

    return timed


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context and number of rows, and for each prompt."""
    model = configured(settings, 2, 2048, "bfloat16").model
    plain = initialise(model, jax.random.key(0), jnp.bfloat16)
    weights = {"bfloat16": plain, "int8": quantized(plain, jnp.bfloat16)}

    def arms(make: Callable[[Params, str], Round]) -> dict[str, Callable[[], Round]]:
        return {name: partial(make, weights[own], cache) for name, (own, cache) in FORMS.items()}

    for context in settings.contexts:
        for rows in settings.rows:

            def step(weights: Params, cache: str, rows: int = rows, context: int = context) -> Round:
                config = configured(settings, rows, context + 2 * settings.steps, cache)
                return decoding(weights, config, context, settings.steps)

            labels = {"what": "decode", "tokens": context, "rows": rows}
            yield Group(labels=labels, arms=arms(step), baseline="bfloat16", rounds=settings.rounds)
            jax.clear_caches()
    for tokens in settings.prompts:

        def read(weights: Params, cache: str, tokens: int = tokens) -> Round:
            return reading(weights, configured(settings, 2, max(2048, tokens), cache), tokens)

        labels = {"what": "prefill", "tokens": tokens, "rows": 1}
        yield Group(labels=labels, arms=arms(read), baseline="bfloat16", rounds=settings.rounds)


EXPERIMENT = Experiment(
    question="What do weights and caches in 8 bits save of the time of steps and of prefill?",
    settings=Settings,
    groups=groups,
    figures={"tokens_per_second": Figure(header="tokens a second", against="ratio")},
    timed=True,
)

"""What do weights and caches in 8 bits save of time, and what do they change of a model's loss?

Time: random weights, by default in the shape of SmolLM-135M, decode many steps in one call, in rows that have so many
tokens in the cache. Loss: of a model on rows of held-out text, of which the last tokens pass one by one through the
decoder's step.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from et_jax.decode import cache as kv
from et_jax.decode import eight_bits
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import decode
from et_jax.models.params import Params
from et_jax.models.transformer import initialise
from et_jax.models.weights import num_bytes, quantized
from et_jax.serve.engine import load
from scripts.measuring import experiment, text
from scripts.measuring.experiment import Figure, Group, setting
from scripts.measuring.shapes import Shaped
from scripts.measuring.states import filled, whole_context
from scripts.measuring.teacher_forced import TeacherForced
from scripts.measuring.timing import Round, seconds

FORMS = {  # of the weights and of the cache
    "bfloat16": ("bfloat16", "bfloat16"),
    "int8 weights": ("int8", "bfloat16"),
    **{f"{kind} cache": ("bfloat16", kind) for kind in eight_bits.NAMED_8_BITS},
    "int8 weights and cache": ("int8", "int8"),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Shaped):
    """Flags of the experiment."""

    contexts: tuple[int, ...] = setting((64, 2048, 8192, 16_384), "tokens of a row", least=1, quick=(64,))
    batches: tuple[int, ...] = setting((2, 16), "rows of a step", least=2, quick=(2,))
    steps: int = setting(16, "steps of a round", least=1, quick=2)
    model: str = experiment.model()
    text: Path = experiment.text()
    rows: int = setting(40, "rows of text", least=2, quick=2)
    length: int = setting(512, "tokens of a row", least=2, quick=129)
    measured: int = setting(256, "the last tokens of a row, which are measured", least=1, quick=8)


def decoding(config: DecoderConfig, weights: Params, context: int) -> Round:
    """Return what decodes from the same state on."""
    run = jax.jit(partial(decode, config), donate_argnums=1)
    begin = jax.jit(partial(filled, config, context, 1.0))

    def timed() -> dict[str, float]:
        state = jax.block_until_ready(begin())
        took = seconds(lambda: run((weights,), state, jnp.int32(config.max_steps)))
        return {"tokens_per_second": config.num_slots * config.max_steps / took}

    return timed


def quality(settings: Settings, weights: str, cache: str) -> dict[str, Any]:
    """Return the loss of each row, and the bytes of the weights and of a cached token."""
    how: dict[str, Any] = {"quantize": "int8"} if weights == "int8" else {}
    how |= {"cache_dtype": cache} if cache != "bfloat16" else {}
    model = load(settings.model, dtype="bfloat16", max_num_seqs=2, **how)
    rows = text.rows(model, settings.text, settings.rows, settings.length)
    bench = TeacherForced(model, rows, settings.length - 1 - settings.measured)
    heads = model.config.num_layers * model.config.num_kv_heads
    token = heads * kv.token_bytes(model.config.head_dim, model.decoder_config.cache_dtype)
    return bench.dense.by_row("loss") | {"weight_bytes": num_bytes(model.params), "token_bytes": token}


def groups(settings: Settings) -> Iterator[Group]:
    """Yield a group for each context and batch, and one of the loss."""
    plain = initialise(settings.model_of(1), jax.random.key(0), jnp.bfloat16)
    stored = {"bfloat16": plain, "int8": quantized(plain, jnp.bfloat16)}
    for context, batch in itertools.product(settings.contexts, settings.batches):
        model = settings.model_of(context + 2 * settings.steps)
        arms = {}
        for form, (weights, cache) in FORMS.items():
            cache_dtype = eight_bits.dtype_named(cache)
            config = whole_context(model, batch, cache_dtype, dtype="bfloat16", max_steps=settings.steps)
            arms[form] = partial(decoding, config, stored[weights], context)
        labels = {"tokens": context, "rows": batch}
        yield Group(labels=labels, arms=arms, baseline="bfloat16", rounds=settings.rounds)
        jax.clear_caches()
    yield Group(arms={form: partial(quality, settings, *kinds) for form, kinds in FORMS.items()}, baseline="bfloat16")


FIGURES = {
    "tokens_per_second": Figure(header="tokens a second", against="ratio"),
    "loss": Figure(header="loss, nats", against="difference"),
    "weight_bytes": Figure(header="bytes of weights"),
    "token_bytes": Figure(header="bytes of a cached token"),
}

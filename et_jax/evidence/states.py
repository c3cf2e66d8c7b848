"""Decoders for a model's whole context, and states in which every slot holds tokens already."""

from typing import Any

import jax
import jax.numpy as jnp

from et_jax.decode import pages, slots
from et_jax.decode.config import DecoderConfig
from et_jax.decode.request import request
from et_jax.decode.state import DecodeState, empty
from et_jax.models.config import ModelConfig
from et_jax.pallas.backend import pick
from et_jax.serve.sizing import DEFAULT_PAGE_SIZE
from et_jax.types import replace


def whole_context(model: ModelConfig, batch: int, dtype: Any, **settings: Any) -> DecoderConfig:
    """Return a decoder of `batch` slots, all in every step and each as long as the model's context."""
    page_size = DEFAULT_PAGE_SIZE.get(jax.default_backend(), 64)
    return DecoderConfig(
        model=model,
        num_slots=batch,
        batch=batch,
        page_size=page_size,
        num_pages=batch * -(-model.max_positions // page_size) + 1,
        max_length=model.max_positions,
        prefill_batch=page_size,
        chunk=page_size,
        cache_dtype=dtype,
        backend=pick(jax.default_backend()),
        **settings,
    )


def filled(config: DecoderConfig, context: int, temperature: float) -> DecodeState:
    """Return a state in which every slot holds `context` tokens and the pages for all that will come."""
    state = empty(config)
    rows = config.num_slots
    blocks = config.blocks_per_slot
    table, _ = pages.reserve(state.table, jnp.full(rows, blocks, jnp.int32), blocks)
    asked = request(config, [5], limit=config.max_length, temperature=temperature)
    for slot in range(rows):
        state = slots.insert(config, state, jnp.int32(slot), asked)
    return replace(state, table=table, length=jnp.full(rows, context, jnp.int32))

"""Decoders for a model's whole context, and states in which slots hold tokens already."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from et_jax.decode import cache as kv
from et_jax.decode import pages, slots
from et_jax.decode.cache import LayerCache
from et_jax.decode.config import DecoderConfig
from et_jax.decode.eight_bits import dequantized, quantized
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


def random_tokens(layer: LayerCache, key: Array, head_dim: int) -> LayerCache:
    """Return a layer with keys and values drawn at random in every page."""
    pages = layer.pages
    if layer.kv_scales is None:
        return replace(layer, pages=jax.random.normal(key, pages.shape, pages.dtype))
    drawn = jax.random.normal(key, (2, *pages.shape[:-1], head_dim))
    (k, of_key), (v, of_value) = (quantized(x, pages.dtype) for x in drawn)
    pages = pages.at[..., :head_dim].set(k).at[..., head_dim : 2 * head_dim].set(v)
    return replace(layer, pages=pages, kv_scales=jnp.stack([of_key, of_value], axis=2))


def with_random_pages(config: DecoderConfig, state: DecodeState, seed: int = 0) -> DecodeState:
    """Return the state with keys and values drawn at random in every page, each with its summary and codes."""
    d, [plant, *others] = config.model.head_dim, state.plants

    @partial(jax.jit, donate_argnums=0)
    def drawn(layer: LayerCache, key: Array) -> LayerCache:
        layer = random_tokens(layer, key, d)
        if layer.summary is None:
            return layer
        num_tokens = jnp.full(layer.pages.shape[1], config.page_size, jnp.int32)
        tokens = dequantized(layer.pages, layer.kv_scales, d)
        summary = kv.summarise(tokens, num_tokens, d)
        layer = replace(layer, summary=jax.tree.map(lambda new, old: new.astype(old.dtype), summary, layer.summary))
        if layer.key_codes is None:
            return layer
        return replace(layer, key_codes=kv.encode(tokens[..., :d], summary.key_box))

    def in_place(layer: LayerCache, key: Array) -> LayerCache:
        """Draw a layer, or each of those that are stacked."""
        if layer.pages.ndim == 4:
            return drawn(layer, key)
        return jax.jit(jax.vmap(drawn), donate_argnums=0)(layer, jax.random.split(key, len(layer.pages)))

    keys = jax.random.split(jax.random.key(seed), len(plant.cache.layers))
    layers = tuple(in_place(layer, key) for layer, key in zip(plant.cache.layers, keys, strict=True))
    return replace(state, plants=(replace(plant, cache=replace(plant.cache, layers=layers)), *others))

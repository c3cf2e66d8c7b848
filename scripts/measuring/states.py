"""States in which slots hold tokens already."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from et_jax.decode import slots
from et_jax.decode.attention.summaries import encode, summarise
from et_jax.decode.cache import pages
from et_jax.decode.cache.kv import LayerCache
from et_jax.decode.config import DecoderConfig
from et_jax.decode.decoder import Decoder
from et_jax.decode.request import request
from et_jax.decode.state import DecodeState, empty
from et_jax.serve import chunks
from et_jax.types import replace

PAGES_DRAWN = 512  # at once


def filled(config: DecoderConfig, context: int) -> DecodeState:
    """Return a state in which every slot holds `context` tokens, greedy, and the pages for all that will come."""
    state = empty(config)
    rows = config.num_slots
    blocks = config.blocks_per_slot
    table, _ = pages.reserve(state.table, jnp.full(rows, blocks, jnp.int32), blocks)
    asked = request(config, [5], limit=config.max_length, temperature=0.0)
    for slot in range(rows):
        state = slots.insert(config, state, jnp.int32(slot), asked)
    return replace(state, table=table, length=jnp.full(rows, context, jnp.int32))


def prefilled(bound: Decoder, weights: Any, prompts: Sequence[list[int]], **asked: Any) -> DecodeState:
    """Return a state in which every slot has read its prompt and begins a sequence of what is asked for."""
    state = bound.empty()
    for slot, prompt in enumerate(prompts):
        for call in chunks.calls(bound.config, slot, prompt[:-1]):
            state, _ = bound.prefill(weights, state, *call)
        state = bound.insert(state, slot, request(bound.config, prompt, index=slot, arrival=slot, **asked))
    return state


def with_random_pages(config: DecoderConfig, state: DecodeState, outstanding: float, longer: float) -> DecodeState:
    """Return the state with keys and values drawn at random in every page, with summaries and codes.

    A share `outstanding` of the keys is `longer` times as long as the others, so that few blocks have most of the mass.
    Pages are drawn a part at a time, where they lie: a pool may fill most of a device's memory.
    """
    d, [plant] = config.model.head_dim, state.plants

    def drawn(page_key: Array, like: LayerCache) -> LayerCache:
        of_pages, of_length = jax.random.split(page_key)
        pages = jax.random.normal(of_pages, like.pages.shape, like.pages.dtype)
        length = jnp.where(jax.random.uniform(of_length, (*pages.shape[:-1], 1)) < outstanding, longer, 1.0)
        part = replace(like, pages=pages.at[..., :d].multiply(length.astype(pages.dtype)))
        if like.summary is None:
            return part
        num_tokens = jnp.full(pages.shape[1], config.page_size, jnp.int32)
        summary = summarise(part.pages, num_tokens, d)
        part = replace(part, summary=jax.tree.map(lambda new, old: new.astype(old.dtype), summary, like.summary))
        if like.key_codes is None:
            return part
        return replace(part, key_codes=encode(part.pages[..., :d], summary.key_box))

    @partial(jax.jit, donate_argnums=0)
    def filled_layer(layer: LayerCache, key: Array) -> LayerCache:
        count = layer.pages.shape[1]
        size = min(count, PAGES_DRAWN)

        def fill(number: Array, layer: LayerCache) -> LayerCache:
            first = jnp.minimum(number * size, count - size)  # the last part overlaps the one before it
            part = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size, axis=1), layer)
            part = drawn(jax.random.fold_in(key, number), part)
            return jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, first, axis=1), layer, part)

        return jax.lax.fori_loop(0, -(-count // size), fill, layer)

    keys = jax.random.split(jax.random.key(0), len(plant.cache.layers))
    layers = tuple(filled_layer(layer, key) for layer, key in zip(plant.cache.layers, keys, strict=True))
    return replace(state, plants=(replace(plant, cache=replace(plant.cache, layers=layers)),))

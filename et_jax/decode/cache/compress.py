"""Cache compression during decoding: the kept entries of each head are gathered into fewer pages, the rest is dropped.

Keys are rotated by their positions before they are cached, so a kept entry is moved, never changed. After a
compression a token's place in the cache is its position less the slot's `shift`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from et_jax.control import compression
from et_jax.control.compression import Compression, Layout
from et_jax.control.policies import Entries
from et_jax.control.switch import MODEL
from et_jax.decode.attention.summaries import encode, summarise
from et_jax.decode.cache import kv, pages, queries
from et_jax.decode.cache.eight_bits import dequantized
from et_jax.decode.config import DecoderConfig
from et_jax.decode.once import run_if
from et_jax.decode.state import DecodeState
from et_jax.models.stacks import Layer, by_layer, stacks_of, through
from et_jax.types import replace


@jax.named_scope("compress")
def compress(config: DecoderConfig, state: DecodeState, slot: Int[Array, ""]) -> tuple[DecodeState, Bool[Array, ""]]:
    """Compress a slot's cache as `config.compression` specifies, into newly allocated pages; False if pages ran out.

    Nothing changes if pages ran out, or if the sequence fits into its region (which is True). The slot's pages
    are released first, and shared ones stay with their other holders. `Compression.point` determines when a sequence
    is compressed, and no step drafts beyond that. Raises ValueError for a decoder without compression.
    """
    own, how = state.plants[MODEL], config.compression
    if own.shift is None or how is None:
        raise ValueError("compression: got None, wanted a Compression in the configuration of this decoder")
    layout = how.layout(config.page_size, config.model.windows)
    if layout.region >= config.blocks_per_slot:  # every sequence fits
        return state, jnp.ones((), bool)
    room = layout.region * config.page_size
    grown = state.num_cached[slot] > room
    wanted = jnp.where(jnp.arange(config.num_slots) == slot, layout.region, 0)
    table, granted = pages.reserve(pages.release(state.table, slot), wanted, layout.region)
    done = granted[slot] & grown

    num_pages = own.cache.layers[0].num_pages
    into = jnp.where(done, table.pages[slot, : layout.region], num_pages)  # past the pool if nothing is done
    cache, skipped = _gathered(config, how, layout, state, slot, into)
    shift = jnp.where(done, state.length[slot] - room, own.shift[slot])
    own = replace(own, cache=cache, shift=own.shift.at[slot].set(shift))
    if own.skipped is not None:
        first = jnp.where(done, skipped, own.skipped[slot])
        own = replace(own, skipped=own.skipped.at[slot].set(first))
    return replace(
        _without_heavy_blocks(state, slot, done).with_plant(MODEL, own),
        table=jax.tree.map(lambda new, old: jnp.where(done, new, old), table, state.table),
    ), granted[slot] | ~grown


def _without_heavy_blocks(state: DecodeState, slot: Int[Array, ""], done: Bool[Array, ""]) -> DecodeState:
    """Return the state without the slot's heavy blocks, so that its model skips one draft."""
    if state.heavy_blocks is None:
        return state
    blocks = jnp.where(done, jnp.zeros_like(state.heavy_blocks[slot]), state.heavy_blocks[slot])
    return replace(state, heavy_blocks=state.heavy_blocks.at[slot].set(blocks))


def _gathered(
    config: DecoderConfig,
    how: Compression,
    layout: Layout,
    state: DecodeState,
    slot: Int[Array, ""],
    into: Int[Array, " m"],
) -> tuple[kv.KVCache, Int[Array, "l k"]]:
    """Return the cache with every layer's `_kept` entries in the pages `into`, and the blocks that each head skips.

    It reads only the blocks of the sequence. A repeatedly compressed sequence has few, however
    long it is: long reads occur only at the first compression.
    """
    own, stacks = state.plants[MODEL], stacks_of(config.model)

    def among(num_blocks: int, carry: tuple, given: tuple) -> tuple:
        def run(layer: Layer, cache: kv.KVCache) -> tuple[kv.KVCache, Int[Array, " k"]]:
            place = cache.layers[layer.place]
            kept, left_out = _kept(config, how, layout, state, slot, place, layer, num_blocks)
            place = kv.put_layer(place, place.numbers(into, layer.turn), kept)
            return kv.with_place(cache, layer.place, place), left_out

        slot, into = given
        cache, outputs = through(stacks, layout.layers, run, carry[0])
        return cache, by_layer(outputs, lambda left_out: left_out, axis=0)

    most, few = config.blocks_per_slot, layout.region - -how.every // config.page_size
    carry, given = (own.cache, jnp.zeros((config.model.num_layers, config.model.num_kv_heads), jnp.int32)), (slot, into)
    if not layout.region < few < most:
        return among(most, carry, given)
    holds_few = own.num_cached[slot] <= few * config.page_size
    carry = run_if(holds_few, partial(among, few), carry, given)
    return run_if(~holds_few, partial(among, most), carry, given)


def _kept(
    config: DecoderConfig,
    how: Compression,
    layout: Layout,
    state: DecodeState,
    slot: Int[Array, ""],
    cached: kv.LayerCache,
    layer: Layer,
    num_blocks: int,
) -> tuple[kv.LayerCache, Int[Array, " k"]]:
    """Return the pages of a region with a layer's kept entries, and how many leading blocks each KV head skips.

    The slot's cached tokens are in its first `num_blocks` blocks.
    """
    own = state.plants[MODEL]
    assert own.shift is not None
    size, d, (k, _, _, e) = config.page_size, config.model.head_dim, cached.pages.shape
    source = cached.numbers(state.table.pages[slot, :num_blocks], layer.turn)
    stored = cached.pages[:, source].reshape(k, -1, e)  # in the order of places
    scales = None if cached.kv_scales is None else cached.kv_scales[:, source].swapaxes(2, 3).reshape(k, -1, 2)
    skips = jnp.zeros(k, jnp.int32) if own.skipped is None else layer.of(own.skipped[slot], axis=0)
    last = at = None
    if own.queries is not None:
        every = layer.of(own.queries[slot], axis=0)
        last, at = queries.newest(every, state.length[slot], own.shift[slot], how.window)
    count = state.num_cached[slot]
    entries = Entries(
        keys=cached.tokens(source, d).reshape(k, -1, e)[..., :d],
        first=skips * size,
        count=count,
        queries=last,
        at=at,
        softmax=config.model.softmax(layer.like),
        layer=layer.like,
        number=None if isinstance(layer.number, int) else layer.number,
    )
    place = compression.kept(entries, how, layout, size)

    def moved(x: Shaped[Array, "k t w"]) -> Shaped[Array, "k n s w"]:
        gathered = jnp.take_along_axis(x, jnp.maximum(place, 0)[..., None], axis=1)
        return jnp.where((place >= 0)[..., None], gathered, jnp.zeros((), x.dtype)).reshape(k, layout.region, size, -1)

    region, scales = moved(stored), None if scales is None else moved(scales).swapaxes(2, 3)
    summary = codes = None
    if cached.summary is not None:
        tokens = dequantized(region, scales, d)
        summary = summarise(tokens, jnp.full(layout.region, size, jnp.int32), d)
        if cached.key_codes is not None:
            codes = encode(tokens[..., :d], summary.key_box)
    left_out = jnp.sum(place < 0, axis=1, dtype=jnp.int32) // size
    return kv.LayerCache(pages=region, summary=summary, key_codes=codes, kv_scales=scales), left_out

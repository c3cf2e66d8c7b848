"""One way to run a model over tokens: write their keys and values, read the cache, note what was read.

Decoding is a chunk of one token a row, prefill, catching up and verification are chunks of several. How the cache is
read is a `Reader`, a value; `extend` alone hands a model its `attend`.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.decode import queries
from et_jax.decode.cache import KVCache, LayerCache, write
from et_jax.decode.chunk import Chunk
from et_jax.decode.plant import Plant, PlantState
from et_jax.decode.readers import Whole
from et_jax.decode.rows import at_slots
from et_jax.models.model import ModelWeights, forward
from et_jax.types import replace


@runtime_checkable
class Reader(Protocol):
    """How a chunk reads the cache. Its arrays lead with the rows; it is a value without side effects."""

    def begun(self, num_rows: int) -> Any:
        """Return the notes of nothing read yet."""

    def together(self, plant: Plant, layer: int) -> bool:
        """Return whether a layer's pages are read once for all rows of a slot."""
        ...

    def read(
        self, plant: Plant, layer: int, q: Float[Array, "r t h d"], cache: KVCache, chunk: Chunk, notes: Any
    ) -> tuple[Float[Array, "r t h d"], Any]:
        """Return attention to what is read of a layer's cache, in which the chunk is written, and the notes."""
        ...


def extend(
    plant: Plant, weights: ModelWeights, state: PlantState, chunk: Chunk, reader: Reader
) -> tuple[Float[Array, "r t v"], PlantState, Any]:
    """Have a model read a chunk: its logits after every token, its state, and the notes of the reader.

    Under jit, logits and notes that the caller ignores are never computed.
    """
    watch = None if state.queries is None else queries.of_chunk(chunk, state.queries.shape[2])

    def watched(layer: int, q: Array, k: Array, v: Array, memory: tuple) -> tuple[Array, tuple]:
        inner, seen = memory
        out, inner = attend(plant, chunk, reader, layer, q, k, v, inner)
        return out, (inner, seen if watch is None else (*seen, watch.seen(q)))

    begun = (state.cache, reader.begun(len(chunk.token))), ()
    logits, ((cache, notes), seen) = forward(weights, plant.model, chunk.token, chunk.positions, watched, begun)
    stored = state.queries
    if watch is not None and stored is not None:
        stored = watch.store(stored, seen)
    return logits, replace(state, cache=cache, queries=stored, num_cached=_num_cached(state, chunk)), notes


def attend(
    plant: Plant,
    chunk: Chunk,
    reader: Reader,
    layer: int,
    q: Float[Array, "r t h d"],
    k: Float[Array, "r t k d"],
    v: Float[Array, "r t k d"],
    memory: tuple[KVCache, Any],
) -> tuple[Float[Array, "r t h d"], tuple[KVCache, Any]]:
    """One layer's attention: write the chunk's keys and values, read, note. `memory` is the cache and the notes."""
    cache, notes = memory
    if not reader.together(plant, layer):
        chunk = replace(chunk, at=None)
    faulty = None
    if chunk.at is not None:  # a row before it in its slot meets a value with weight 0, and 0 * NaN is NaN
        faulty = (chunk.count > 0) & ~jnp.all(jnp.isfinite(v), axis=(1, 2, 3))
        v = jnp.where(faulty[:, None, None, None], 0.0, v)
    cached = write(cache.layers[layer], k, v, chunk.table, chunk.start, chunk.count, chunk.end)
    cache = with_layer(cache, layer, cached)
    out, notes = reader.read(plant, layer, q, cache, chunk, notes)
    if faulty is not None:
        out = jnp.where(faulty[:, None, None, None], jnp.nan, out)
    return out, (cache, notes)


def catch_up(
    plant: Plant,
    weights: ModelWeights,
    state: PlantState,
    slot: Int[Array, " r"] | None,
    table: Int[Array, "r n"],
    text: Int[Array, "r m"],
    wanted: Int[Array, " r"],
    chunk: int,
    audited: bool = False,
) -> tuple[PlantState, Int[Array, ""], Bool[Array, "r m"] | None]:
    """Have a model read its rows' texts up to `wanted` tokens: chunk by chunk, none crossing a multiple of `chunk`.

    That is how prompts are read, so that nothing depends on when a model catches up. Returns how many passes that
    took and, where it is `audited`, at which positions the token that follows was the likeliest to this model.
    """
    agreed = jnp.zeros(text.shape, bool) if audited else None

    def behind(carry: tuple) -> Bool[Array, ""]:
        return jnp.any(at_slots(slot, carry[0].num_cached) < wanted)

    def read(carry: tuple) -> tuple:
        state, passes, agreed = carry
        cached = at_slots(slot, state.num_cached)
        end = jnp.maximum(jnp.minimum(wanted, (cached // chunk + 1) * chunk), cached)
        position = cached[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        part = Chunk(
            slot=slot,
            table=table,
            token=jnp.take_along_axis(text, jnp.minimum(position, text.shape[1] - 1), axis=1),
            position=cached,
            start=jnp.where(end > cached, cached, 0),
            count=end - cached,
            end=end,
        )
        logits, state, _ = extend(plant, weights, state, part, Whole())
        if agreed is not None:
            said = jnp.take_along_axis(text, jnp.minimum(position + 1, text.shape[1] - 1), axis=1)
            place = jnp.where(position < end[:, None], position, text.shape[1])
            same = jnp.argmax(logits, axis=-1) == said
            agreed = agreed.at[jnp.arange(text.shape[0])[:, None], place].set(same, mode="drop")
        return state, passes + 1, agreed

    return jax.lax.while_loop(behind, read, (state, jnp.int32(0), agreed))


def with_layer(cache: KVCache, layer: int, cached: LayerCache) -> KVCache:
    """Return the cache with another layer in the place of one."""
    return replace(cache, layers=(*cache.layers[:layer], cached, *cache.layers[layer + 1 :]))


def _num_cached(state: PlantState, chunk: Chunk) -> Int[Array, " b"]:
    """How far the model has come in the text of every slot."""
    reached = jnp.where(chunk.count > 0, chunk.position + chunk.count, 0)
    if chunk.slot is None:
        return jnp.maximum(state.num_cached, reached)
    return state.num_cached.at[chunk.slot].max(reached)

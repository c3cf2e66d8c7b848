"""Runs a model over tokens: writes their keys and values, attends to the cache, records what was read.

Decoding is a chunk of one token a row; prefill, catching up and verification are chunks of several. A `Reader`, a
value, defines how the cache is read, and a `LayerReader` one layer of it: equal layers share one trace of `attend`,
and a scan runs them if they are stacked.
"""

from collections.abc import Hashable
from functools import partial
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from et_jax.decode import sharded, work
from et_jax.decode.attention.blocks import places_of
from et_jax.decode.attention.readers import FullAttention
from et_jax.decode.cache import queries
from et_jax.decode.cache.kv import LayerCache, with_place, with_summaries, write
from et_jax.decode.chunk import Chunk
from et_jax.decode.mixing import ExpertReads, RowRules, mix, no_experts
from et_jax.decode.packed import packed, unpacked
from et_jax.decode.plant import Plant, PlantState
from et_jax.decode.rows import at_slots
from et_jax.decode.work import Work
from et_jax.models.experts import Experts
from et_jax.models.model import ModelWeights, forward
from et_jax.models.stacks import Layer, OfTurn, Threaded, by_layer, located, parts, stacks_of
from et_jax.models.transformer import Angles
from et_jax.models.weights import with_adapters
from et_jax.pallas.add_norm import add_norm
from et_jax.pallas.backend import platform
from et_jax.pallas.paged_attention.api import padded_heads
from et_jax.pallas.rotate_store import rotate_store
from et_jax.softmax import Softmax
from et_jax.types import replace

GPU_ROWS = 64
"""On a GPU the number of tokens in a product is padded to a multiple of it.

Below it the library's order of summation depends on the number: a sequence would get other bits if some of its tokens
were verified in parallel.
"""


@runtime_checkable
class LayerReader(Protocol):
    """How a chunk reads one layer of the cache: a pytree whose arrays lead with the rows, without side effects.

    There may be more queries than rows of the chunk, which are padding; the result may omit them.
    Layers whose readers have equal structure share a trace.
    """

    def together(self, plant: Plant, softmax: Softmax) -> bool:
        """Return whether the pages are read once for all rows of a slot."""
        ...

    def read(
        self,
        plant: Plant,
        softmax: Softmax,
        q: Float[Array, "n t c d"],
        cached: LayerCache,
        surprisal: Float[Array, "p s"] | None,
        chunk: Chunk,
    ) -> tuple[Float[Array, "_ t h d"], Any]:
        """Return attention to the layer, which contains the chunk already, and the record of what was read."""
        ...


@runtime_checkable
class Reader(Protocol):
    """How a chunk reads the cache: a reader of every layer, and a function that combines their records."""

    def kinds(self, plant: Plant) -> tuple[Hashable, ...]:
        """Return a value for every layer: stacked layers with equal values have readers of equal structure."""
        ...

    def of_layer(self, plant: Plant, layer: Layer) -> LayerReader:
        """Return the reader of a layer."""
        ...

    def recorded(self, plant: Plant, chunk: Chunk, records: tuple[Any, ...]) -> Any:
        """Return the combined record from those of all layers in order, in the form of `models.stacks.through`."""
        ...


def extend(
    plant: Plant,
    weights: ModelWeights,
    state: PlantState,
    chunk: Chunk,
    reader: Reader,
    rules: RowRules | None = None,
) -> tuple[Float[Array, "r t v"], PlantState, Any, ExpertReads | None]:
    """Run a model over a chunk: return its logits after every token, its state, the reader's record, and its experts.

    Tokens are routed to experts as trained, or by `rules`. Under jit, logits and records that the caller ignores are
    never computed.
    """
    watch = None if state.queries is None else queries.of_chunk(chunk, state.queries.shape[2])
    stacks = stacks_of(plant.model)
    run = attend if plant.mesh is None else partial(sharded.by_heads, attend)
    num_rows, chunk = len(chunk.token), replace(chunk, seen=chunk.lengths)  # the same for all layers
    fewer_launches = plant.mesh is None and chunk.token.shape[1] == 1 and platform() == "gpu"
    beside = -num_rows % GPU_ROWS if fewer_launches else 0
    places = places_of(chunk, plant.page_size) if fewer_launches else None

    def multiplied(x: Shaped[Array, "r *rest"]) -> Shaped[Array, "n *rest"]:
        missing = num_rows + beside - len(x)
        return jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]) if missing else x

    def attending(
        layer: int | Layer,
        q: Array,
        k: Array,
        v: Array,
        memory: Threaded,
        softmax: Softmax,
        angles: Angles | None = None,
    ) -> tuple[Array, Threaded]:
        layer = located(stacks, layer) if isinstance(layer, int) else layer
        cache, took = memory.carried
        place = cache.layers[layer.place]
        own = chunk
        if layer.turn is not None:
            turn = jnp.asarray(layer.turn, jnp.int32)
            own = replace(chunk, table=place.numbers(chunk.table, turn), own_table=chunk.table, turn=turn)
            own = replace(own, places=places)
        of_layer = reader.of_layer(plant, layer)
        if angles is None:
            k, v = (x[:num_rows] for x in (k, v))
            out, place, recorded = run(plant, softmax, own, of_layer, q, k, v, place, cache.surprisal)
        else:
            products = q, k, v, *angles
            out, place, recorded = attend_rotated(plant, softmax, own, of_layer, products, place, cache.surprisal)
        recorded = packed(recorded) if fewer_launches and layer.turn is not None else recorded
        output = recorded, None if watch is None else watch.seen(q[:num_rows])
        carried = with_place(cache, layer.place, place), took
        return multiplied(out), Threaded(carried=carried, outputs=(*memory.outputs, output))

    def mixing(layer: int | Layer, experts: OfTurn[Experts], x: Array, memory: Threaded) -> tuple[Array, Threaded]:
        cache, took = memory.carried
        out, took = experts.call(partial(mix, plant), x[:num_rows], chunk, rules, took)
        return multiplied(out), replace(memory, carried=(cache, took))

    if state.adapter is not None:
        weights = with_adapters(weights, multiplied(at_slots(chunk.slot, state.adapter)))
    begun = Threaded(carried=(state.cache, no_experts(plant, chunk.token.shape[0])))
    tokens, positions = multiplied(chunk.token), multiplied(chunk.positions)
    kinds = reader.kinds(plant)
    fused = rotating = None
    if plant.backend == "gpu" and fewer_launches:
        fused = add_norm
        # if rows are read together, or queries are stored, XLA needs the rotated ones
        in_8_bits = any(place.kv_scales is not None for place in state.cache.layers)
        rotating = attending if chunk.at is None and watch is None and not in_8_bits else None
    logits, memory = forward(weights, plant.model, tokens, positions, attending, begun, mixing, kinds, fused, rotating)
    if plant.mesh is not None:
        logits = sharded.over_vocabulary(plant.mesh, logits)
    cache, took = memory.carried
    stored = state.queries
    if watch is not None and stored is not None:
        stored = watch.store(stored, by_layer(memory.outputs, itemgetter(1), axis=2))
    records = unpacked(parts(memory.outputs, itemgetter(0)))
    after = replace(state, cache=cache, queries=stored, num_cached=_num_cached(state, chunk))
    return logits[:num_rows], after, reader.recorded(plant, chunk, records), took


@partial(jax.jit, static_argnums=0)
def attend(
    plant: Plant,
    softmax: Softmax,
    chunk: Chunk,
    reader: LayerReader,
    q: Float[Array, "n t h d"],
    k: Float[Array, "r t k d"],
    v: Float[Array, "r t k d"],
    cached: LayerCache,
    surprisal: Float[Array, "p s"] | None,
) -> tuple[Float[Array, "_ t h d"], LayerCache, Any]:
    """Compute one layer's attention: write the chunk's keys and values, read, record.

    It is jitted to share its trace: the differences between equal layers are arrays.
    """
    if not reader.together(plant, softmax):
        chunk = replace(chunk, at=None)
    faulty = None
    if chunk.at is not None:  # an earlier row of the slot multiplies a later value by weight 0, and 0 * NaN is NaN
        faulty = (chunk.count > 0) & ~jnp.all(jnp.isfinite(v), axis=(1, 2, 3))
        v = jnp.where(faulty[:, None, None, None], 0.0, v)
    full_page = None if chunk.places is None else chunk.places.full
    cached = write(cached, k, v, chunk.table, chunk.start, chunk.count, chunk.end, full_page, chunk.turn)
    out, records = reader.read(plant, softmax, q, cached, surprisal, chunk)
    if faulty is not None:
        out = jnp.where(faulty[:, None, None, None], jnp.nan, out)
    return out, cached, records


@partial(jax.jit, static_argnums=0)
def attend_rotated(
    plant: Plant,
    softmax: Softmax,
    chunk: Chunk,
    reader: LayerReader,
    products: tuple[Float[Array, "..."], ...],
    cached: LayerCache,
    surprisal: Float[Array, "p s"] | None,
) -> tuple[Float[Array, "n 1 h d"], LayerCache, Any]:
    """Compute what `attend` does for one token a row of stacked layers, by a kernel that rotates and stores.

    `products` are unrotated queries, keys and values, then the cosines and sines.
    """
    assert chunk.own_table is not None and chunk.turn is not None and chunk.places is not None
    columns = padded_heads(plant.model.group_size)
    q, k, v, cosine, sine = (x[:, 0] for x in products)
    place, turn = (chunk.own_table, chunk.start, chunk.count), chunk.turn.reshape(1)
    settings = {"depth": cached.depth, "columns": columns}
    q, pages = rotate_store(q, k, v, cosine, sine, cached.pages, *place, turn, **settings)
    at, d = (chunk.table, chunk.start, chunk.count, chunk.end), q.shape[-1]
    cached = with_summaries(replace(cached, pages=pages), d, *at, full_page=chunk.places.full, turn=chunk.turn)
    out, records = reader.read(plant, softmax, q.reshape(len(q), 1, -1, d), cached, surprisal, chunk)
    return out, cached, records


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
) -> tuple[PlantState, Work, Bool[Array, "r m"]]:
    """Run a model over its rows' sequences up to `wanted` tokens: in chunks that cross no multiple of `chunk`.

    Prompts are read in the same chunks, so nothing depends on when a model catches up. Returns the work that this took
    and, if it is `audited`, the positions at which the following token was this model's likeliest.
    """

    def behind(carry: tuple) -> Bool[Array, ""]:
        return jnp.any(at_slots(slot, carry[0].num_cached) < wanted)

    def read(carry: tuple) -> tuple:
        state, done, agreed = carry
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
        logits, state, _, took = extend(plant, weights, state, part, FullAttention())
        if audited:
            said = jnp.take_along_axis(text, jnp.minimum(position + 1, text.shape[1] - 1), axis=1)
            place = jnp.where(position < end[:, None], position, text.shape[1])
            same = jnp.argmax(logits, axis=-1) == said
            agreed = agreed.at[jnp.arange(text.shape[0])[:, None], place].set(same, mode="drop")
        return state, done.plus(work.of_chunks(plant, part.count, end, took)), agreed

    return jax.lax.while_loop(behind, read, (state, work.no_work(plant, len(wanted)), jnp.zeros(text.shape, bool)))


def _num_cached(state: PlantState, chunk: Chunk) -> Int[Array, " b"]:
    """Return how many tokens of every slot the model has read."""
    reached = jnp.where(chunk.count > 0, chunk.position + chunk.count, 0)
    if chunk.slot is None:
        return jnp.maximum(state.num_cached, reached)
    return state.num_cached.at[chunk.slot].max(reached)

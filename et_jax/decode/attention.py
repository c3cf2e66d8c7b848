"""Attention over the paged cache, as the model is handed it: write, choose blocks, read them, note what was read.

This is where the cache, the selectors and the kernels meet. The step and the prefill each make an
`attend` for `models.transformer.forward`; what it threads through the layers is a `LayerCarry`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control.base import pack_blocks, unpack_blocks
from et_jax.control.select import Selection, Selector
from et_jax.control.view import attention_entropy
from et_jax.decode.cache import KVCache, LayerCache, token_width, write
from et_jax.decode.reading import ReadPolicy, read_all, read_chosen
from et_jax.decode.selection import (
    Blocks,
    blocks_of,
    held_blocks,
    in_units_read,
    least_share_read,
    select,
    shares_after,
    trace_scores,
    with_residual,
)
from et_jax.models.config import ModelShape
from et_jax.models.transformer import Attend
from et_jax.pallas.backend import NAMES, pick
from et_jax.pallas.paged_attention.api import paged_attention
from et_jax.pallas.paged_prefill.api import paged_prefill
from et_jax.pallas.softmax import Softmax
from et_jax.sums import total
from et_jax.types import pytree, replace


@pytree
class ReadStats:
    """What attention read, gathered over the layers run so far.

    `blocks_read` counts blocks over layers and KV heads, `summaries_read` likewise where a selector
    looked; `kept_mass` is the least share of attention mass on the blocks read, over layers and heads;
    `entropies` sums each query head's attention entropy over the layers whose blocks were chosen by this
    token, `num_entropies` counts those heads and `least_entropy` is the least (inf where there are none).
    `block_masks` holds each layer's packed mask, `block_masses` the share of mass of every query head and block, where
    selectors go by it (None elsewhere).
    """

    blocks_read: Int[Array, " b"]
    summaries_read: Int[Array, " b"]
    kept_mass: Float[Array, " b"]
    entropies: Float[Array, " b"]
    num_entropies: Float[Array, " b"]
    least_entropy: Float[Array, " b"]
    block_masks: tuple[UInt32[Array, "b k n32"], ...]
    block_masses: tuple[Float[Array, "b h n"] | None, ...] = ()

    @property
    def reads(self) -> Int[Array, "b l k"]:
        """The blocks that each layer and KV head read."""
        words = jax.lax.population_count(jnp.stack(self.block_masks, axis=1))
        return jnp.sum(words.astype(jnp.int32), axis=-1, dtype=jnp.int32)


@pytree
class LayerCarry:
    """The cache on its way through the layers, and the stats so far; `queries` of every slot, where they are stored."""

    cache: KVCache
    stats: ReadStats
    queries: Float[Array, "b l w h d"] | None = None


@pytree
class ReadRow:
    """What attention must know of each row of a decode step, whose new token sits at place `length` of its cache.

    Rows where `run` is False write nothing and read nothing. Where `fresh` is False the blocks of
    `block_mask`, those last read, are read again and nothing is chosen anew; `kept_mass` is what was
    kept then. Rows of one slot stand beside each other: its cache holds `end` tokens once all are written, and each row
    sees those up to its own. `selectors` are those of every layer, their numbers with a row each. `at[i, j]` is the
    row of the j-th token of the i-th slot, where there is none its first row; None says that no two rows share a slot.
    `skipped` counts the blocks at the beginning that a KV head holds nothing of, None where each holds all.
    `block_mass` is what share each query head had on each block when that was last read; None where no selector goes
    by it.
    """

    table: Int[Array, "b n"]
    length: Int[Array, " b"]
    end: Int[Array, " b"]
    run: Bool[Array, " b"]
    tolerance: Float[Array, " b"]
    fresh: Bool[Array, " b"]
    block_mask: UInt32[Array, "b l k n32"]
    kept_mass: Float[Array, " b"]
    selectors: tuple[Selector, ...]
    at: Int[Array, "s t"] | None = None
    skipped: Int[Array, "b l k"] | None = None
    block_mass: Float[Array, "b l h n"] | None = None


def no_reads(batch: int) -> ReadStats:
    """Return stats of nothing read."""
    zeros, ones = jnp.zeros(batch, jnp.int32), jnp.ones(batch, jnp.float32)
    return ReadStats(
        blocks_read=zeros,
        summaries_read=zeros,
        kept_mass=ones,
        entropies=0.0 * ones,
        num_entropies=0.0 * ones,
        least_entropy=jnp.inf * ones,
        block_masks=(),
    )


def decode_attend(reading: ReadPolicy, row: ReadRow) -> Attend:
    """Return the `attend` of one decode step."""
    count = row.run.astype(jnp.int32)
    lengths = jnp.where(row.run, row.length + 1, 0)

    def attend(layer: int, q: Array, k: Array, v: Array, memory: LayerCarry) -> tuple[Array, LayerCarry]:
        reads_all = row.selectors[layer].reads_all
        mass = None if row.block_mass is None else row.block_mass[:, layer]
        at = row.at if reading.reads_together(layer, not reads_all) else None
        faulty = None
        if at is not None:  # a row before it in its slot meets a value with weight 0, and 0 * NaN is NaN
            faulty = row.run & ~jnp.all(jnp.isfinite(v), axis=(1, 2, 3))
            v = jnp.where(faulty[:, None, None, None], 0.0, v)
        cached = write(memory.cache.layers[layer], k, v, row.table, row.length, count, row.end)
        cache = with_layer(memory.cache, layer, cached)
        queries = q[:, 0]
        blocks = blocks_of(row.table, lengths, reading.page_size, reading.model.windows[layer])
        if reads_all:
            skipped = None if row.skipped is None else row.skipped[:, layer]
            out = read_all(reading, layer, queries, cached, row.table, lengths, at, skipped)
            opened = jnp.broadcast_to(
                blocks.readable[:, None], (len(lengths), reading.model.num_kv_heads, row.table.shape[1])
            )
            if skipped is not None:
                opened &= jnp.arange(row.table.shape[1]) >= skipped[..., None]
            stats = _note(memory.stats, opened)
        else:
            grouped = _grouped(queries, reading, layer)
            chosen = _choose(reading, layer, grouped, cache, blocks, row)
            out, log_read, block_lse = read_chosen(
                reading, layer, queries, cached, row.table, chosen.opened, lengths, at
            )
            log_read = log_read.reshape(grouped.shape[:3])
            if chosen.shares:
                chosen = in_units_read(chosen, blocks, log_read)
            if mass is not None:
                known = shares_after(chosen, blocks, block_lse.reshape(*grouped.shape[:3], -1)).reshape(mass.shape)
                mass = known if reading.refresh_every == 1 else jnp.where(row.fresh[:, None, None], known, mass)
            if reading.residual:
                assert cached.summary is not None  # `select` has looked at it
                d = reading.model.head_dim
                values = cached.summary.mean[:, row.table].swapaxes(0, 1)[..., d : 2 * d]
                whole = with_residual(out.astype(jnp.float32).reshape(grouped.shape), chosen, blocks, log_read, values)
                out = whole.astype(out.dtype).reshape(out.shape)
            stats = _note(memory.stats, chosen.opened)
            kept = jnp.where(row.fresh, least_share_read(chosen, blocks, log_read), row.kept_mass)
            looked = jnp.where(row.fresh, held_blocks(lengths, reading.page_size), 0) * reading.model.num_kv_heads
            entropy = attention_entropy(chosen.estimate, (blocks.num_tokens > 0)[:, None, None])
            stats = replace(
                stats,
                kept_mass=jnp.minimum(stats.kept_mass, kept),
                summaries_read=stats.summaries_read + looked,
                entropies=stats.entropies + jnp.where(row.fresh, total(entropy.reshape(entropy.shape[0], -1)), 0.0),
                num_entropies=stats.num_entropies + jnp.where(row.fresh, float(reading.model.num_heads), 0.0),
                least_entropy=jnp.where(
                    row.fresh, jnp.minimum(stats.least_entropy, jnp.min(entropy, axis=(1, 2))), stats.least_entropy
                ),
            )
        stats = replace(stats, block_masses=(*stats.block_masses, mass))
        if faulty is not None:
            out = jnp.where(faulty[:, None, None], jnp.nan, out)
        return out[:, None], LayerCarry(cache=cache, stats=stats)

    return attend


def prefill_attend(
    reading: ReadPolicy,
    table: Int[Array, "b n"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    end: Int[Array, " b"],
) -> Attend:
    """Return the `attend` of chunks of prompts: `count[b]` tokens from position `start[b]` on, read densely.

    A row's slot holds `end[b]` tokens once every row is written: rows of one slot may share a page.
    """

    def attend(layer: int, q: Array, k: Array, v: Array, memory: KVCache) -> tuple[Array, KVCache]:
        cached = write(memory.layers[layer], k, v, table, start, count, end)
        softmax, backend = reading.softmax(layer), reading.backend
        out, _ = paged_prefill(q, cached.pages, table, start, softmax=softmax, backend=backend)
        return out, with_layer(memory, layer, cached)

    return attend


def serving_backend(
    model: ModelShape, page_size: int, dtype: DTypeLike, first: str | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return the best attention backend, from `first` on, that serves this model's shapes, and why better ones do not.

    By default `first` is the best there is here.
    """
    return _first_to_serve(partial(_trace_attention, model, page_size, dtype), first or pick())


def scoring_backend(
    model: ModelShape, page_size: int, dtype: DTypeLike, key_codes: bool, attention: str
) -> tuple[str, tuple[str, ...]]:
    """Return what scores this model's blocks and why no better one: the backend of attention, or the best that can."""
    return _first_to_serve(partial(trace_scores, model, page_size, dtype, key_codes), attention)


def _first_to_serve(trace: Callable[[str], Any], name: str) -> tuple[str, tuple[str, ...]]:
    """The first backend, from `name` on in order of preference, that does not refuse; and the refusals."""
    names, refusals = list(NAMES), []
    while True:
        try:
            jax.eval_shape(partial(trace, name))
            return name, tuple(refusals)
        except NotImplementedError as error:
            names.remove(name)
            refusals.append(str(error))
            name = pick(built=names)


def _trace_attention(model: ModelShape, page_size: int, dtype: DTypeLike, backend: str) -> tuple[Array, Array]:
    """Both ops on one row and one page."""
    integers = partial(jnp.zeros, dtype=jnp.int32)
    pages = jnp.zeros((model.num_kv_heads, 2, page_size, token_width(model.head_dim)), dtype)
    queries = jnp.zeros((1, page_size, model.num_heads, model.head_dim), dtype)
    softmax = Softmax(scale=1.0, window=next(iter(model.windows)))
    lists = integers((1, model.num_kv_heads, 1)), integers((1, model.num_kv_heads))
    decoded, _ = paged_attention(
        queries[:, 0], pages, integers((1, 1)), *lists, integers(1), softmax=softmax, backend=backend
    )
    chunk, _ = paged_prefill(queries, pages, integers((1, 1)), integers(1), softmax=softmax, backend=backend)
    return decoded, chunk


def _choose(
    reading: ReadPolicy, layer: int, query: Float[Array, "b k g d"], cache: KVCache, blocks: Blocks, row: ReadRow
) -> Selection:
    """The layer's selection; where a row is not `fresh`, the blocks it read last and the one being written."""

    def choose() -> Selection:
        selector, backend = row.selectors[layer], reading.scores_backend
        mass = None if row.block_mass is None else row.block_mass[:, layer]
        return select(selector, query, cache, layer, blocks, row.tolerance, backend, reading.sensitivity, mass)

    if reading.refresh_every == 1:
        return choose()
    shapes = jax.eval_shape(choose)
    if shapes.upper is not None:
        raise ValueError("refresh_every: a certified selector proves something of this token's query alone; use 1")
    chosen = jax.lax.cond(
        jnp.any(row.fresh),
        choose,
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
    )
    last = unpack_blocks(row.block_mask[:, layer])[..., : row.table.shape[1]]
    again = (last & blocks.readable[:, None]) | blocks.certain[:, None]
    return replace(chosen, opened=jnp.where(row.fresh[:, None, None], chosen.opened, again))


def _note(stats: ReadStats, opened: Bool[Array, "b k n"]) -> ReadStats:
    return replace(
        stats,
        blocks_read=stats.blocks_read + jnp.sum(opened, axis=(1, 2), dtype=jnp.int32),
        block_masks=(*stats.block_masks, pack_blocks(opened)),
    )


def _grouped(queries: Float[Array, "b h d"], reading: ReadPolicy, layer: int) -> Float[Array, "b k g d"]:
    """Queries by KV head, float32, scaled so that query . key is the score."""
    b, _, d = queries.shape
    return queries.astype(jnp.float32).reshape(b, reading.model.num_kv_heads, -1, d) * reading.softmax(layer).scale


def with_layer(cache: KVCache, layer: int, cached: LayerCache) -> KVCache:
    """Return the cache with another layer in the place of one."""
    return replace(cache, layers=(*cache.layers[:layer], cached, *cache.layers[layer + 1 :]))

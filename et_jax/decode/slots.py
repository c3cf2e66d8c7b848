"""The contents of slots: sequences start, share pages, split, end, and are swapped to the host and back.

Like the functions of `decode`, each takes a state and returns one.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from et_jax.decode.cache import kv, pages
from et_jax.decode.config import DecoderConfig
from et_jax.decode.fresh import blank_signals
from et_jax.decode.plant import PlantState
from et_jax.decode.request import Request
from et_jax.decode.sampling import settings as sampling
from et_jax.decode.sampling.settings import TokenCounts
from et_jax.decode.sampling.steering import UNLIMITED
from et_jax.decode.state import DecodeState, fresh_control
from et_jax.types import replace

T = TypeVar("T")
SlotRow = dict[str, Any]
"""The state of one slot except its pages, by the names of `DecodeState`."""

_OF_ALL = frozenset({"table", "draft_laws"})  # fields that do not belong to a single slot

Pages = tuple[kv.KVCache, ...]
"""Some pages of every plant's cache, with equal numbers."""


def insert(config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], request: Request) -> DecodeState:
    """Start a sequence in `slot`, whose prompt except the last token has been prefilled."""

    def put(tree: T, row: T) -> T:
        return jax.tree.map(lambda x, y: x.at[slot].set(y), tree, row)

    counts = state.counts
    if counts is not None:
        if request.in_prompt is None:
            raise ValueError("request.in_prompt: got None, wanted the prompt's tokens, because penalties are kept")
        none_yet = jnp.zeros(config.model.vocab_size, jnp.int32)
        counts = put(counts, TokenCounts(in_prompt=request.in_prompt, generated=none_yet))
    return replace(
        state,
        token=state.token.at[slot].set(request.token),
        generated=state.generated.at[slot].set(0),
        limit=state.limit.at[slot].set(request.limit),
        active=state.active.at[slot].set(request.limit > 0),
        allowance=state.allowance.at[slot].set(UNLIMITED),
        arrival=state.arrival.at[slot].set(request.arrival),
        urgency=state.urgency.at[slot].set(request.urgency),
        stop_ids=state.stop_ids.at[slot].set(request.stop_ids),
        logprobs=state.logprobs.at[slot].set(request.logprobs),
        sampling=put(state.sampling, sampling.fold_key(request.sampling, request.index)),
        counts=counts,
        steering=put(state.steering, request.steering),
        text=put(state.text, request.text),
        draft=put(state.draft, config.fresh_drafts(request.num_drafted, state.draft_laws, state.length[slot])),
        heavy_blocks=None if state.heavy_blocks is None else state.heavy_blocks.at[slot].set(0),
        switch=put(state.switch, request.laws.switch_started()),
        laws=put(state.laws, request.laws),
        signals=put(state.signals, blank_signals(())),
        control=put(state.control, fresh_control(config, request.laws, request.sampling.temperature)),
    )


def release(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Stop a slot's sequence, clear its request and release its pages."""
    return replace(
        state,
        active=state.active.at[slot].set(False),
        length=state.length.at[slot].set(0),
        generated=state.generated.at[slot].set(0),
        plants=tuple(plant.emptied(slot) for plant in state.plants),
        logprobs=state.logprobs.at[slot].set(False),
        sampling=jax.tree.map(lambda x, y: x.at[slot].set(y), state.sampling, sampling.plain(())),
        steering=None if state.steering is None else replace(state.steering, on=state.steering.on.at[slot].set(False)),
        table=pages.release(state.table, slot),
    )


def fork(
    config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], into: Int[Array, ""]
) -> tuple[DecodeState, Bool[Array, ""]]:
    """Continue `slot`'s sequence a second time in the empty slot `into`; False if no page was free.

    Full pages are shared by reference count; the partial page is copied with its summary. The key is
    folded with `into`, so that the continuations differ; everything else, control included, is equal. A
    refused fork changes nothing.
    """
    length = state.num_cached[slot]
    full, num_blocks = length // config.page_size, -(-length // config.page_size)
    shared = pages.share(state.table, into, state.table.pages[slot], full)
    wanted = jnp.where(jnp.arange(config.num_slots) == into, num_blocks, 0)
    table, granted = pages.reserve(shared, wanted, 1)
    granted = granted[into]
    page = jnp.where(granted, state.table.pages[slot, full], 0)
    into_page = jnp.where(granted, table.pages[into, full], 0)
    copied = _with_pages(state, into_page[None], _taken(state, page[None]))
    rows = jnp.arange(config.num_slots)
    source = jnp.where((rows == into) & granted, slot, rows)

    def row(x: Array) -> Array:
        return x[source]

    forked = _with_rows(copied, jax.tree.map(row, _rows(state)))
    split = sampling.fold_key(jax.tree.map(lambda x: x[slot], state.sampling), into).key
    keys = forked.sampling.key.at[into].set(jnp.where(granted, split, forked.sampling.key[into]))
    return replace(
        forked,
        sampling=replace(forked.sampling, key=keys),
        table=jax.tree.map(lambda new, old: jnp.where(granted, new, old), table, state.table),
    ), granted


def share(state: DecodeState, slot: Int[Array, ""], listed: Int[Array, " n"], count: Int[Array, ""]) -> DecodeState:
    """Start the empty `slot` with the first `count` of the allocated pages `listed`, filled with its prompt's tokens.

    If queries are stored, `Compression.fresh_tokens` of the prompt must be left to be computed.
    """
    seen = count * state.plants[0].cache.layers[0].pages.shape[2]
    return replace(
        state,
        table=pages.share(state.table, slot, listed, count),
        length=state.length.at[slot].set(seen),
        plants=tuple(replace(plant, num_cached=plant.num_cached.at[slot].set(seen)) for plant in state.plants),
    )


def increment(state: DecodeState, listed: Int[Array, " n"], count: Int[Array, ""]) -> DecodeState:
    """Add a reference to the first `count` of the allocated pages `listed`, to be removed by `decrement`."""
    return replace(state, table=pages.increment(state.table, listed, count))


def decrement(state: DecodeState, listed: Int[Array, " n"], count: Int[Array, ""]) -> DecodeState:
    """Undo `increment` for the first `count` of the pages `listed`."""
    return replace(state, table=pages.decrement(state.table, listed, count))


def read_row(state: DecodeState, slot: Int[Array, ""]) -> SlotRow:
    """Return a copy of the state of `slot` except its pages."""
    return jax.tree.map(lambda x: x[slot], _rows(state))


def read_pages(config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], first: Int[Array, ""]) -> Pages:
    """Return a copy of the `pages_per_swap` pages of `slot` from block `first` on; past its last, the null page."""
    return _taken(state, _blocks(config, state, slot, first, beyond=0))


def write_row(
    config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], row: SlotRow
) -> tuple[DecodeState, Bool[Array, ""]]:
    """Put a sequence that `read_row` copied into the empty `slot`; False, and nothing changed, if pages ran out.

    Its pages are allocated, and are valid only after `write_pages`.
    """
    here = jnp.arange(config.num_slots) == slot
    shift = row["plants"][0]["shift"]
    num_cached = row["length"] if shift is None else row["length"] - shift
    if config.takes_turns:  # one of the models may have written the newest token, for which the other is awaited
        num_cached = functools.reduce(jnp.maximum, (own["num_cached"] for own in row["plants"]), num_cached)
    blocks = -(-num_cached // config.page_size)
    table, granted = pages.reserve(state.table, jnp.where(here, blocks, 0), config.blocks_per_slot)
    granted = granted[slot]

    def put(old: Array, new: Array) -> Array:
        return old.at[slot].set(jnp.where(granted, new, old[slot]))

    return replace(_with_rows(state, jax.tree.map(put, _rows(state), row)), table=table), granted


def write_pages(
    config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], first: Int[Array, ""], taken: Pages
) -> DecodeState:
    """Write what `read_pages` copied into the pages of `slot` from block `first` on."""
    return _with_pages(state, _blocks(config, state, slot, first, beyond=config.num_pages), taken)


def _rows(state: DecodeState) -> SlotRow:
    """Return the fields of a state that lead with the slot, those of every plant by their names too."""
    fields = {
        field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name not in _OF_ALL
    }
    own = [field.name for field in dataclasses.fields(PlantState) if field.name != "cache"]
    return fields | {"plants": [{name: getattr(plant, name) for name in own} for plant in state.plants]}


def _with_rows(state: DecodeState, rows: SlotRow) -> DecodeState:
    """Return the state with other fields that lead with the slot."""
    plants = tuple(replace(plant, **own) for plant, own in zip(state.plants, rows["plants"], strict=True))
    return replace(state, **rows | {"plants": plants})


def _taken(state: DecodeState, listed: Int[Array, " m"]) -> Pages:
    """Return a copy of the listed pages, of every model."""
    return tuple(kv.take_pages(plant.cache, listed) for plant in state.plants)


def _with_pages(state: DecodeState, listed: Int[Array, " m"], taken: Pages) -> DecodeState:
    """Return the state with the pages of `taken` written to the listed ones."""
    both = zip(state.plants, taken, strict=True)
    return replace(
        state, plants=tuple(replace(plant, cache=kv.put_pages(plant.cache, listed, own)) for plant, own in both)
    )


def _blocks(
    config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], first: Int[Array, ""], beyond: int
) -> Int[Array, " m"]:
    """Return the pages of a chunk's worth of blocks, `beyond` for blocks that the slot does not have."""
    block = first + jnp.arange(config.pages_per_swap, dtype=jnp.int32)
    page = state.table.pages[slot, jnp.minimum(block, config.blocks_per_slot - 1)]
    return jnp.where(block < state.table.num_blocks[slot], page, beyond)

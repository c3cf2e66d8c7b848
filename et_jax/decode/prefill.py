"""Writes prompt tokens into the cache, chunks of several prompts in one call."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.budget import PromptRecord
from et_jax.control.switch import MODEL
from et_jax.decode.attention.budgeted import Budgeted
from et_jax.decode.attention.readers import FullAttention
from et_jax.decode.cache import kv, pages
from et_jax.decode.chunk import Chunk
from et_jax.decode.config import DecoderConfig
from et_jax.decode.extend import Reader, extend
from et_jax.decode.plant import Weights, check_weights
from et_jax.decode.state import DecodeState
from et_jax.types import replace


def prefill(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    slot: Int[Array, " r"],
    tokens: Int[Array, "r t"],
    count: Int[Array, " r"],
    last: Bool[Array, " r"],
) -> tuple[DecodeState, Bool[Array, " r"]]:
    """Write the next prompt tokens of inactive slots into the cache; False where pages ran out.

    Each row is a chunk of a prompt: the first `count` of its tokens, then padding. Chunks of one prompt
    are in consecutive order; `last` marks those that end their prompt, which use full attention whatever a
    budget selects. Rows without tokens do nothing. The prompt's last token is left for `insert`, so that every token is
    sampled in `step`. A refused slot is unchanged.
    """
    state, granted, _ = read_chunks(config, weights, state, slot, tokens, count, last)
    return state, granted


def read_chunks(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    slot: Int[Array, " r"],
    tokens: Int[Array, "r t"],
    count: Int[Array, " r"],
    last: Bool[Array, " r"],
) -> tuple[DecodeState, Bool[Array, " r"], Float[Array, "r t v"] | None]:
    """Return what `prefill` does, and the model's logits after every token; None if only the small model reads.

    Under jit, logits that the caller ignores are never computed.
    """
    check_weights(weights, len(config.plants))
    index_of_row = jnp.arange(slot.shape[0])
    same_slot = jnp.where(slot[:, None] == slot, count, 0)  # "r r": the tokens of every row in each row's slot
    before = jnp.sum(jnp.where(index_of_row < index_of_row[:, None], same_slot, 0), axis=1)
    cached, total = state.length[slot], jnp.sum(same_slot, axis=1)
    blocks = jnp.where(count > 0, -(-(cached + total) // config.page_size), 0)
    most = tokens.size // config.page_size + 1
    table, granted = pages.reserve(state.table, jnp.zeros_like(state.length).at[slot].max(blocks), most)
    granted = granted[slot]
    written = jnp.where(granted, count, 0)
    start, end = (jnp.where(written > 0, cached + x, 0) for x in (before, total))
    pages_of = table.pages[slot]
    part = Chunk(slot=slot, table=pages_of, token=tokens, position=start, start=start, count=written, end=end)
    readers: list[Reader] = [FullAttention()] * len(config.plants)
    if config.controller.budget is not None:
        readers[MODEL] = Budgeted(budget=config.controller.budget, last=last, records=_begun(config, state, part))
    plants, found, records = list(state.plants), {}, {}
    for index in range(int(config.lazy), len(config.plants)):
        read = extend(config.plants[index], weights[index], plants[index], part, readers[index])
        found[index], plants[index], records[index], _ = read
    logits, recorded = found.get(MODEL), records.get(MODEL)
    control = state.control if recorded is None else replace(state.control, prompt=recorded)
    newest, own = state.logits, plants[MODEL]
    if newest is not None and logits is not None:
        ends = (written > 0) & (before + count == total)
        final = logits[index_of_row, jnp.maximum(count - 1, 0)]
        if own.cache.surprisal is not None:
            first = jnp.where((before > 0)[:, None], jnp.roll(final, 1, axis=0), newest[slot])
            given = jnp.concatenate([first[:, None], logits[:, :-1]], axis=1)
            surprisal = jnp.where(part.positions == 0, 0.0, entropy.surprisal(given, tokens))
            cache = kv.write_surprisal(own.cache, surprisal, pages_of, start, written)
            plants[MODEL] = replace(own, cache=cache)
        newest = newest.at[jnp.where(ends, slot, config.num_slots)].set(final, mode="drop")
    after = replace(
        state,
        table=table,
        plants=tuple(plants),
        logits=newest,
        length=state.length.at[slot].add(written),
        control=control,
    )
    return after, granted, logits


def _begun(config: DecoderConfig, state: DecodeState, chunk: Chunk) -> PromptRecord:
    """Return the records of every slot, those of prompts that begin in these rows reset."""
    begins = (chunk.start == 0) & (chunk.count > 0)
    slot = jnp.where(begins, chunk.slot, config.num_slots)
    return jax.tree.map(
        lambda old, new: old.at[slot].set(new, mode="drop"), state.control.prompt, config.fresh_prompt()
    )

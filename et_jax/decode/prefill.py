"""Prompt tokens into the cache, chunks of several prompts in one call."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from et_jax.control import entropy
from et_jax.decode import cache as kv
from et_jax.decode import pages, queries
from et_jax.decode.attention import prefill_attend
from et_jax.decode.small import Weights, of_model, of_small
from et_jax.decode.state import DecoderConfig, DecodeState
from et_jax.models.transformer import forward
from et_jax.types import replace


def prefill(
    config: DecoderConfig,
    params: Weights,
    state: DecodeState,
    slot: Int[Array, " r"],
    tokens: Int[Array, "r t"],
    count: Int[Array, " r"],
) -> tuple[DecodeState, Bool[Array, " r"]]:
    """Write the next prompt tokens of inactive slots into the cache; False where pages ran out.

    Each row is a chunk of a prompt: the first `count` of its tokens, then padding. Chunks of one prompt
    stand one below the other, in order. Rows of no tokens do nothing. The prompt's last token is left for
    `insert`, so that every token is sampled in `step`. A refused slot is unchanged.
    """
    index = jnp.arange(slot.shape[0])
    mine = jnp.where(slot[:, None] == slot, count, 0)  # "r r": what every row adds to each row's slot
    before = jnp.sum(jnp.where(index < index[:, None], mine, 0), axis=1)
    held, total = state.length[slot], jnp.sum(mine, axis=1)
    blocks = jnp.where(count > 0, -(-(held + total) // config.page_size), 0)
    most = tokens.size // config.page_size + 1
    table, granted = pages.reserve(state.table, jnp.zeros_like(state.length).at[slot].max(blocks), most)
    granted = granted[slot]
    written = jnp.where(granted, count, 0)
    start, end = (jnp.where(written > 0, held + x, 0) for x in (before, total))
    attend = prefill_attend(config.read_policy, table.pages[slot], start, written, end)
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    logits, cache, compressed = None, state.cache, state.compressed
    if compressed is not None and compressed.queries is not None:
        window, length = compressed.queries.shape[2], tokens.shape[1]
        watch = queries.of_prefill(slot, start, written, end, window, length)
        asked = tokens, positions, watch.attend(attend), (cache, ())
        logits, (cache, seen) = forward(of_model(params), config.model, *asked)
        compressed = replace(compressed, queries=watch.store(compressed.queries, seen))
    elif not config.lazy:
        logits, cache = forward(of_model(params), config.model, tokens, positions, attend, cache)
    beside, held_beside, held_by_model = state.small, state.held, state.model_held
    if config.small is not None:
        assert held_beside is not None
        attend = prefill_attend(config.small_policy, table.pages[slot], start, written, end)
        _, beside = forward(of_small(params), config.small, tokens, positions, attend, beside)
        held_beside = held_beside.at[slot].add(written)
    if held_by_model is not None and not config.lazy:
        held_by_model = held_by_model.at[slot].add(written)
    last = state.logits
    if last is not None and logits is not None:
        ends = (written > 0) & (before + count == total)
        final = logits[index, jnp.maximum(count - 1, 0)]
        if cache.surprisal is not None:
            first = jnp.where((before > 0)[:, None], jnp.roll(final, 1, axis=0), last[slot])
            given = jnp.concatenate([first[:, None], logits[:, :-1]], axis=1)
            surprisal = jnp.where(positions == 0, 0.0, entropy.surprisal(given, tokens))
            cache = kv.write_surprisal(cache, surprisal, table.pages[slot], start, written)
        last = last.at[jnp.where(ends, slot, config.num_slots)].set(final, mode="drop")
    return replace(
        state,
        table=table,
        cache=cache,
        small=beside,
        held=held_beside,
        model_held=held_by_model,
        compressed=compressed,
        logits=last,
        length=state.length.at[slot].add(written),
    ), granted

"""Prompt tokens into the cache, chunks of several prompts in one call."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.budget import PromptNotes
from et_jax.decode import cache as kv
from et_jax.decode import pages, queries
from et_jax.decode.attention import prefill_attend
from et_jax.decode.budgeted import PromptCarry, PromptRow, budgeted_attend
from et_jax.decode.small import Weights, of_model, of_small
from et_jax.decode.state import DecoderConfig, DecodeState, fresh_prompt
from et_jax.models.model import forward
from et_jax.types import replace


def prefill(
    config: DecoderConfig,
    params: Weights,
    state: DecodeState,
    slot: Int[Array, " r"],
    tokens: Int[Array, "r t"],
    count: Int[Array, " r"],
    last: Bool[Array, " r"],
) -> tuple[DecodeState, Bool[Array, " r"]]:
    """Write the next prompt tokens of inactive slots into the cache; False where pages ran out.

    Each row is a chunk of a prompt: the first `count` of its tokens, then padding. Chunks of one prompt
    stand one below the other, in order; `last` tells those that end their prompt, which are read densely whatever a
    budget says. Rows of no tokens do nothing. The prompt's last token is left for `insert`, so that every token is
    sampled in `step`. A refused slot is unchanged.
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
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    logits: Float[Array, "r t v"] | None = None
    cache, control, compressed = state.cache, state.control, state.compressed
    budget = config.controller.budget
    if not config.lazy:
        rows = PromptRow(slot=slot, table=table.pages[slot], start=start, count=written, end=end, last=last)
        if budget is None:
            attend, memory = prefill_attend(config.read_policy, rows.table, start, written, end), cache
        else:
            attend = budgeted_attend(config.read_policy, budget, rows)
            memory = PromptCarry(cache=cache, notes=_begun(config, state, rows))
        stored = None if compressed is None else compressed.queries
        if compressed is None or stored is None:
            logits, memory = forward(of_model(params), config.model, tokens, positions, attend, memory)
        else:
            watch = queries.of_prefill(slot, start, written, end, stored.shape[2], tokens.shape[1])
            asked = tokens, positions, watch.attend(attend), (memory, ())
            logits, (memory, seen) = forward(of_model(params), config.model, *asked)
            compressed = replace(compressed, queries=watch.store(stored, seen))
        if isinstance(memory, PromptCarry):
            cache, control = memory.cache, replace(control, prompt=memory.notes)
        else:
            cache = memory
    beside, held_beside, held_by_model = state.small, state.held, state.model_held
    if config.small is not None:
        assert held_beside is not None
        attend = prefill_attend(config.small_policy, table.pages[slot], start, written, end)
        _, beside = forward(of_small(params), config.small, tokens, positions, attend, beside)
        held_beside = held_beside.at[slot].add(written)
    if held_by_model is not None and not config.lazy:
        held_by_model = held_by_model.at[slot].add(written)
    newest = state.logits
    if newest is not None and logits is not None:
        ends = (written > 0) & (before + count == total)
        final = logits[index, jnp.maximum(count - 1, 0)]
        if cache.surprisal is not None:
            first = jnp.where((before > 0)[:, None], jnp.roll(final, 1, axis=0), newest[slot])
            given = jnp.concatenate([first[:, None], logits[:, :-1]], axis=1)
            surprisal = jnp.where(positions == 0, 0.0, entropy.surprisal(given, tokens))
            cache = kv.write_surprisal(cache, surprisal, table.pages[slot], start, written)
        newest = newest.at[jnp.where(ends, slot, config.num_slots)].set(final, mode="drop")
    return replace(
        state,
        table=table,
        cache=cache,
        small=beside,
        held=held_beside,
        model_held=held_by_model,
        compressed=compressed,
        logits=newest,
        length=state.length.at[slot].add(written),
        control=control,
    ), granted


def _begun(config: DecoderConfig, state: DecodeState, rows: PromptRow) -> PromptNotes:
    """The notes of every slot, those of prompts that begin in these rows as of nothing read."""
    notes, fresh = state.control.prompt, fresh_prompt(config)
    assert notes is not None and fresh is not None
    begins = (rows.start == 0) & (rows.count > 0)
    slot = jnp.where(begins, rows.slot, config.num_slots)
    return jax.tree.map(lambda old, new: old.at[slot].set(new, mode="drop"), notes, fresh)

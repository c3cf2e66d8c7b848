"""One step: choose, reserve, propose, extend, verify; a sequence gains a token, or several where drafts hold."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.base import ControlState, Signals, name_of, one_like
from et_jax.control.controller import Controller
from et_jax.decode import cache as kv
from et_jax.decode import cost, pages, queries, small
from et_jax.decode import draft as drafting
from et_jax.decode.attention import LayerCarry, ReadRow, ReadStats, decode_attend, no_reads
from et_jax.decode.draft import Drafting, Drafts
from et_jax.decode.once import where_asked
from et_jax.decode.rows import Rows, at_slots
from et_jax.decode.small import Weights, of_model
from et_jax.decode.state import Compressed, DecoderConfig, DecodeState, StepOutput
from et_jax.decode.verify import advance, verify
from et_jax.models.model import ModelWeights, forward
from et_jax.types import replace

# Cells of the grid of slots and their tokens for each row that there is: more, and rows are read one by one.
_MOST_CELLS = 3


def step(config: DecoderConfig, params: Weights, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """Advance the sequences served by one token, or by several where drafts are accepted.

    choose -> reserve -> propose -> extend -> verify. A slot that got no page is refused: no token, and its
    clock, key and control are unchanged. Under `config.draft` the output leads with the positions after the
    newest token: what the first holds is a step without drafts.
    """
    state, chosen = choose(config, state)
    table, rows = reserve(config, state, chosen)
    model = of_model(params)
    moved = traffic(model, state.cache, config.by_mass_of)
    state = replace(state, table=table)
    if config.draft is None:
        logits, memory = extend(config, model, state, rows, rows.place + 1)
        state = replace(state, cache=memory.cache, compressed=_compressed(state, memory))
        after, output, _ = advance(config, moved, state, rows, logits, memory.stats, True)
        return after, output
    state, count = reserve_drafts(config, config.draft, state, rows)
    state, drafts = propose(config, config.draft, params, state, rows, count)
    cache, logits, stats, at = extend_drafted(config, config.draft, model, state, rows, drafts)
    state = replace(state, cache=cache)
    return verify(config, config.draft, moved, state, rows, drafts, logits, stats, at)


@jax.named_scope("choose")
def choose(
    config: DecoderConfig, state: DecodeState, ready: Bool[Array, " b"] | bool = True
) -> tuple[DecodeState, Rows]:
    """Score every slot, and take the `batch` runnable ones of highest priority, of those that are `ready`.

    A priority that is no number comes first, and ends its sequence; the lowest stays above idle slots.
    """
    runnable = state.active & ready
    signals = replace(
        state.signals,
        length=state.length,
        generated=state.generated,
        remaining=state.limit - state.generated,
        arrival=state.arrival,
        pages_held=state.table.num_blocks,
        urgency=state.urgency,
    )
    priority = jax.vmap(_priority)(state.laws, signals, state.control)
    slot = None
    if config.batch < config.num_slots:
        score = jnp.where(jnp.isnan(priority), jnp.inf, priority)
        score = jnp.where(runnable, jnp.maximum(score, jnp.finfo(score.dtype).min), -jnp.inf)
        slot = jax.lax.top_k(score, config.batch)[1]
    token, position, active = at_slots(slot, (state.token, state.length, runnable))
    shift = None if state.compressed is None else at_slots(slot, state.compressed.shift)
    rows = Rows(slot=slot, token=token, position=position, run=active, shift=shift)
    return replace(state, control=replace(state.control, priority=priority)), rows


@jax.named_scope("reserve")
def reserve(config: DecoderConfig, state: DecodeState, rows: Rows) -> tuple[pages.PageTable, Rows]:
    """Find a page for every token to be written; a row that got none does not run."""
    wanted = jnp.where(rows.run, rows.place // config.page_size + 1, 0)
    table, granted = pages.reserve(state.table, rows.spread(config.num_slots, wanted), 1)
    return table, replace(rows, run=rows.run & rows.take(granted))


@jax.named_scope("extend")
def extend(
    config: DecoderConfig,
    params: ModelWeights,
    state: DecodeState,
    rows: Rows,
    end: Int[Array, " r"],
    at: Int[Array, "s t"] | None = None,
) -> tuple[Float[Array, "r v"], LayerCarry]:
    """Write the rows' tokens into the cache and read it: the logits of what comes next, and what was read.

    A row's slot holds `end` tokens once all rows are written, of which the row sees those up to its own. `at` says
    which rows share a slot, None that no two do.
    """
    control, held = rows.take(state.control), state.compressed
    row = ReadRow(
        table=rows.take(state.table.pages),
        length=rows.place,
        end=end,
        run=rows.run,
        tolerance=control.tolerance,
        fresh=rows.take(state.generated) % config.controller.refresh_every == 0,
        block_mask=control.block_mask,
        kept_mass=rows.take(state.signals.kept_mass),
        selectors=rows.take(state.laws).selectors(config.model.num_layers),
        at=at,
        skipped=None if held is None or held.skipped is None else rows.take(held.skipped),
        block_mass=control.block_mass,
    )
    cache = state.cache
    if cache.surprisal is not None:
        surprisal = jnp.where(rows.position == 0, 0.0, entropy.surprisal(rows.take(state.logits), rows.token))
        cache = kv.write_surprisal(cache, surprisal[:, None], row.table, row.length, row.run.astype(jnp.int32))
    attend = decode_attend(config.read_policy, row)
    memory = LayerCarry(cache=cache, stats=no_reads(rows.token.shape[0]))
    asked = rows.token[:, None], rows.position[:, None]
    if held is None or held.queries is None:
        logits, memory = forward(params, config.model, *asked, attend, memory)
        return logits[:, 0], memory
    watch = queries.of_step(rows)
    logits, (memory, seen) = forward(params, config.model, *asked, watch.attend(attend), (memory, ()))
    return logits[:, 0], replace(memory, queries=watch.store(held.queries, seen))


@jax.named_scope("reserve")
def reserve_drafts(
    config: DecoderConfig, how: Drafting, state: DecodeState, rows: Rows
) -> tuple[DecodeState, Int[Array, " r"]]:
    """Find pages for what is to be drafted, among those left over; a row that got none drafts nothing.

    Returns how many tokens each row drafts, as far as its sequence does at all.
    """
    assert state.draft is not None
    wanted, left = rows.take((state.draft.length, state.limit - state.generated))
    count = drafting.allowed(rows.run, wanted, left, how.most)
    blocks = jnp.where(count > 0, (rows.position + count) // config.page_size + 1, 0)
    most = how.most // config.page_size + 1
    table, granted = pages.reserve(state.table, rows.spread(config.num_slots, blocks), most)
    return replace(state, table=table), jnp.where(rows.take(granted), count, 0)


def propose(
    config: DecoderConfig, how: Drafting, params: Weights, state: DecodeState, rows: Rows, count: Int[Array, " r"]
) -> tuple[DecodeState, Drafts]:
    """Guess the `count` tokens that follow the newest one of every row, or as many of them as there is a guess at."""
    if how.drafter is None:
        return small.draft(config, how, small.of_small(params), state, rows, count)
    assert state.text is not None
    token = how.drafter(rows.take(state.text), rows.position, how.most)
    guessed = jnp.sum(jnp.cumprod(token >= 0, axis=1), axis=1, dtype=jnp.int32)
    return state, Drafts(token=jnp.maximum(token, 0), count=jnp.minimum(count, guessed))


def extend_drafted(
    config: DecoderConfig, how: Drafting, params: ModelWeights, state: DecodeState, rows: Rows, drafts: Drafts
) -> tuple[kv.KVCache, Float[Array, "w v"], ReadStats, Int[Array, "r t1"]]:
    """Extend by the rows and their drafts, in the least number of rows that holds them.

    Returns the cache, logits and stats of every row, and which of them each token of a row is.
    """
    widths = how.widths(config.batch)
    whole, end, at = drafting.laid_out(rows, drafts, widths[-1])
    needed = config.batch + jnp.sum(drafts.count)

    def run(cache: kv.KVCache, rows: Rows) -> tuple[Float[Array, "w v"], LayerCarry]:
        width = len(rows.token)
        shared = at if config.batch < width and at.size <= _MOST_CELLS * width else None
        return extend(config, params, replace(state, cache=cache), rows, end[:width], shared)

    logits, memory = jax.eval_shape(lambda: run(state.cache, whole))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (logits, memory.stats))
    carry = state.cache, blank

    def fill(carry: tuple, rows: Rows) -> tuple:
        cache, wide = carry
        logits, memory = run(cache, rows)
        found = logits, memory.stats
        return memory.cache, jax.tree.map(lambda old, new: old.at[: len(new)].set(new), wide, found)

    for width, narrower in zip(widths, (0, *widths), strict=False):
        some = jax.tree.map(lambda x, width=width: x[:width], whole)
        carry = where_asked((needed <= width) & (needed > narrower), fill, carry, some)
    cache, (logits, stats) = carry
    return cache, logits, stats, at


def traffic(params: ModelWeights, cache: kv.KVCache, by_mass_of: int = 0) -> cost.Traffic:
    """Return the bytes of what a step may read.

    Where blocks are chosen by the last masses of `by_mass_of` query heads of a KV head, one number of each is read, and
    one written.
    """
    layer = cache.layers[0]
    num_blocks = layer.pages.shape[0] * layer.pages.shape[1]
    return cost.Traffic(
        weights=cost.num_bytes(params),
        block=cost.num_bytes(layer.pages) // num_blocks,
        summary=cost.num_bytes((layer.summary, layer.key_codes)) // num_blocks + 2 * 4 * by_mass_of,
    )


def _compressed(state: DecodeState, memory: LayerCarry) -> Compressed | None:
    """What compression knows, with the queries of this step."""
    held = state.compressed
    return held if held is None or memory.queries is None else replace(held, queries=memory.queries)


def _priority(laws: Controller, signals: Signals, control: ControlState) -> Float[Array, ""]:
    score = laws.priority(signals, control)
    return one_like(control.priority, score, f"The priority rule {name_of(laws.priority)} returns")

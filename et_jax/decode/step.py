"""One step: choose, reserve, propose, extend, verify; a sequence gains a token, or several if drafts are accepted."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.base import ControlState, Signals, name_of, one_like
from et_jax.control.controller import Controller
from et_jax.control.draft import MOST_DRAFTED
from et_jax.control.switch import MODEL
from et_jax.decode import cost
from et_jax.decode.attention.pruned import RecordedRows
from et_jax.decode.attention.readers import BlockSparse
from et_jax.decode.attention.reads import ReadStats
from et_jax.decode.cache import kv, pages
from et_jax.decode.chunk import of_rows
from et_jax.decode.config import DecoderConfig
from et_jax.decode.drafting import drafter, turns
from et_jax.decode.drafting import drafts as drafting
from et_jax.decode.drafting.drafts import Drafting, Drafts, Pruned
from et_jax.decode.extend import extend
from et_jax.decode.mixing import RowRules
from et_jax.decode.once import run_if
from et_jax.decode.output import StepOutput
from et_jax.decode.plant import PlantState, Weights, check_weights, costs
from et_jax.decode.rows import Rows, at_slots
from et_jax.decode.sampling.steering import forced_ahead
from et_jax.decode.state import DecodeState
from et_jax.decode.verify import advance, undrafted, verify
from et_jax.decode.work import Work, by_position, no_work, of_tokens
from et_jax.types import replace

# The most cells of the grid (slot, token) per row; beyond it, each row attends separately.
_MOST_CELLS = 3


def step(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    *,
    drafts: bool = True,
    chooses: bool = True,
    num_rows: int | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Advance the batch's sequences by one token, or by several if drafts are accepted.

    choose -> reserve -> propose -> extend -> verify. A slot that got no page is refused: it gets no token, and its
    clock, key and control are unchanged. The outputs have a leading axis of the step's tokens: one or, with drafts, as
    many as may be accepted; the first equals that of a step without drafts. If `config.draft` is None, or without
    `drafts`, the step is a much smaller program. So is a step that never `chooses` blocks; it gives the same result for
    sequences shorter than their `min_context`. With `num_rows` a step decodes at most that many sequences, with the
    same results as a step of `batch`. If two models alternate, a step runs one of them, for the sequences in which it
    is active.
    """
    check_weights(weights, len(config.plants))
    shared = config.batch
    if num_rows is not None:
        config = replace(config, batch=num_rows)
    active, ready = turns.chosen(state)
    state, chosen = choose(config, state, ready)
    table, rows = reserve(config, state, chosen)
    state = replace(state, table=table)
    state = write_surprisals(state, rows)
    price = partial(_price, costs(config.plants, weights, state.plants, config.by_mass_of), shared, active)
    own, audit, reading = config.plants[MODEL], None, partial(extend_rows, chooses=chooses)
    if config.draft is not None and drafts:
        guessed = guessed_before(config.draft, state, rows)
        state, count = reserve_drafts(config, config.draft, state, rows, guessed)
        state, drafted = propose(config, config.draft, weights, state, rows, count, guessed)
        state, logits, stats, whole, at = extend_drafted(config, config.draft, weights, state, rows, drafted, reading)
        state = write_drafted_surprisals(state, rows, drafted, logits, at)
        after, outputs = verify(config, config.draft, price, state, rows, drafted, logits, stats, at)
        done = of_tokens(own, whole, stats.blocks_read, stats.summaries_read, stats.experts)
        produced = jax.vmap(rows.take)(outputs.produced)
        work = worked(by_position(done, at, drafted.count, produced), drafted)
    else:
        state, logits, stats, work, audit = turns.extend_active(config, weights, state, rows, active, reading)
        after, output, _ = advance(config, price, state, rows, logits, stats, True)
        if config.draft is not None:
            after = undrafted(after, rows, stats)
            work += tuple(no_work(plant, len(rows.token)) for plant in config.plants[len(work) :])
        outputs, work, audit = jax.tree.map(lambda x: x[None], (output, work, audit))
    refused = rows.spread(config.num_slots, chosen.run & ~rows.run)
    work, audit = jax.vmap(lambda each: rows.spread(config.num_slots, each))((work, audit))
    return after, replace(outputs, refused=outputs.refused.at[0].set(refused), work=work, audit=audit)


@jax.named_scope("choose")
def choose(
    config: DecoderConfig, state: DecodeState, ready: Bool[Array, " b"] | bool = True
) -> tuple[DecodeState, Rows]:
    """Score every slot, and select the `batch` runnable and `ready` slots of highest priority.

    A NaN priority ranks first, and ends its sequence; the lowest priority ranks above idle slots.
    """
    runnable = state.runnable & ready
    signals = replace(
        state.signals,
        length=state.length,
        generated=state.generated,
        remaining=state.limit - state.generated,
        arrival=state.arrival,
        allocated_pages=state.table.num_blocks,
        urgency=state.urgency,
    )
    priority = jax.vmap(_priority)(state.laws, signals, state.control)
    slot = None
    if config.batch < config.num_slots:
        score = jnp.where(jnp.isnan(priority), jnp.inf, priority)
        score = jnp.where(runnable, jnp.maximum(score, jnp.finfo(score.dtype).min), -jnp.inf)
        slot = jax.lax.top_k(score, config.batch)[1]
    token, position, active = at_slots(slot, (state.token, state.length, runnable))
    shift = at_slots(slot, state.plants[MODEL].shift)
    rows = Rows(slot=slot, token=token, position=position, run=active, shift=shift)
    return replace(state, control=replace(state.control, priority=priority)), rows


@jax.named_scope("reserve")
def reserve(config: DecoderConfig, state: DecodeState, rows: Rows) -> tuple[pages.PageTable, Rows]:
    """Allocate a page for every token to be written; a row without a page does not run."""
    wanted = jnp.where(rows.run, rows.place // config.page_size + 1, 0)
    table, granted = pages.reserve(state.table, rows.spread(config.num_slots, wanted), 1)
    return table, replace(rows, run=rows.run & rows.take(granted))


@jax.named_scope("surprisal")
def write_surprisals(state: DecodeState, rows: Rows) -> DecodeState:
    """Return the state with the surprisal of every row's token, if the cache stores surprisals."""
    own = state.plants[MODEL]
    if own.cache.surprisal is None or state.logits is None:
        return state
    surprisal = jnp.where(rows.position == 0, 0.0, entropy.surprisal(rows.take(state.logits), rows.token))
    table, count = rows.take(state.table.pages), rows.run.astype(jnp.int32)
    cache = kv.write_surprisal(own.cache, surprisal[:, None], table, rows.place, count)
    return state.with_plant(MODEL, replace(own, cache=cache))


@jax.named_scope("surprisal")
def write_drafted_surprisals(
    state: DecodeState, rows: Rows, drafts: Drafts, logits: Float[Array, "w v"], at: Int[Array, "r t1"]
) -> DecodeState:
    """Return the state with the surprisals of drafted tokens under the preceding `logits`, `at` as in `laid_out`.

    The entry of a rejected token is overwritten before it is read.
    """
    own = state.plants[MODEL]
    if own.cache.surprisal is None:
        return state

    def with_one(i: Int[Array, ""], known: Float[Array, "r t"]) -> Float[Array, "r t"]:
        return known.at[:, i].set(entropy.surprisal(logits[at[:, i]], drafts.token[:, i]))

    surprisal = jax.lax.fori_loop(0, jnp.max(drafts.count), with_one, jnp.zeros(drafts.token.shape, jnp.float32))
    table, count = rows.take(state.table.pages), jnp.where(rows.run, drafts.count, 0)
    cache = kv.write_surprisal(own.cache, surprisal, table, rows.place + 1, count)
    return state.with_plant(MODEL, replace(own, cache=cache))


@jax.named_scope("extend")
def extend_rows(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    rows: Rows,
    end: Int[Array, " r"],
    at: Int[Array, "s t"] | None = None,
    recorded_rows: RecordedRows | None = None,
    *,
    chooses: bool = True,
) -> tuple[DecodeState, Float[Array, "r v"], ReadStats]:
    """Run the model on the rows' tokens under the laws; return the next token's logits and the read statistics.

    A row's slot contains `end` tokens once all rows are written; `at` as in `Chunk`. The blocks with most attention
    mass are recorded for `recorded_rows`. `chooses` is False if no blocks are to be selected.
    """
    own, control, laws = state.plants[MODEL], rows.take(state.control), config.controller
    own_laws = rows.take(state.laws)
    chunk = of_rows(rows, rows.take(state.table.pages), end, at)
    reader = BlockSparse(
        tolerance=control.tolerance,
        fresh=rows.take(state.generated) % laws.refresh_every == 0,
        block_mask=control.block_mask,
        kept_mass=rows.take(state.signals.kept_mass),
        selectors=own_laws.selectors(config.model.num_layers),
        min_context=own_laws.min_context,
        skipped=None if own.skipped is None else rows.take(own.skipped),
        block_mass=control.block_mass,
        refresh_every=laws.refresh_every,
        residual=laws.residual,
        sensitivity=config.calibration.sensitivity,
        recorded_rows=recorded_rows,
        pruned=config.pruned,
        page_size=config.page_size,
        chooses=chooses,
    )
    rules = None
    if own_laws.experts is not None:
        known = rows.take(state.generated) > 0
        rules = RowRules(rule=own_laws.experts, entropy=jnp.where(known, rows.take(state.signals).entropy, jnp.inf))
    logits, own, stats, took = extend(config.plants[MODEL], weights[MODEL], own, chunk, reader, rules)
    return state.with_plant(MODEL, own), logits[:, 0], replace(stats, experts=took)


@jax.named_scope("reserve")
def reserve_drafts(
    config: DecoderConfig, how: Drafting, state: DecodeState, rows: Rows, guessed: Drafts | None = None
) -> tuple[DecodeState, Int[Array, " r"]]:
    """Allocate pages for drafted tokens from the remaining ones; a row without pages drafts nothing.

    Returns how many tokens each row drafts: those `guessed` before, or as many as its draft law asks for.
    """
    wanted, left, allowance = rows.take((state.draft.length, state.limit - state.generated, state.allowance))
    if state.heavy_blocks is not None:  # a row without recorded blocks of its newest token records them first
        wanted = jnp.where(jnp.any(rows.take(state.heavy_blocks) != 0, axis=(1, 2, 3)), wanted, 0)
    if guessed is not None:
        wanted = jnp.where(guessed.count > 0, guessed.count, wanted)
    wanted = jnp.minimum(wanted, allowance - 1)
    count = drafting.allowed(rows.run, jnp.minimum(wanted, _room_ahead(config, state, rows)), left, how.most)
    blocks = jnp.where(count > 0, (rows.place + count) // config.page_size + 1, 0)
    most = how.most // config.page_size + 1
    table, granted = pages.reserve(state.table, rows.spread(config.num_slots, blocks), most)
    return replace(state, table=table), jnp.where(rows.take(granted), count, 0)


def _room_ahead(config: DecoderConfig, state: DecodeState, rows: Rows) -> Int[Array, " r"] | int:
    """Return how many tokens after the newest token of each row may be verified with it.

    None may lie past a compression. If selectors use surprisals, none may lie in the next block, because its tokens
    would attend to the newest block by surprisals that are not known yet.
    """
    ahead: Int[Array, " r"] | int = MOST_DRAFTED
    how = config.compression
    if how is not None and config.layout is not None and rows.shift is not None:
        length, generated = rows.take((state.length, state.generated))
        region = config.layout.region * config.page_size
        ahead = how.until_point(length + 1 - generated, length, rows.shift, region) - 1
    if "surprisals" in config.keeps:
        ahead = jnp.minimum(ahead, config.page_size - 1 - rows.place % config.page_size)
    return ahead


def guessed_before(how: Drafting, state: DecodeState, rows: Rows) -> Drafts | None:
    """Return the tokens that a grammar forces, or the drafts of the lookup before the drafter, up to its draft length.

    None if there is neither grammar nor lookup.
    """
    found = None
    if how.before is not None and state.draft.before is not None:
        found = guesses(how.before, state, rows, rows.take(state.draft.before.length))
    if state.steering is None:
        return found
    steering, allowance, most = rows.take((state.steering, state.allowance, state.draft.most))
    token, count = forced_ahead(steering, allowance, how.most)
    forced = Drafts(token=token, count=jnp.minimum(count, most))
    if found is None:
        return forced
    bound = forced.count > 0
    count = jnp.where(bound, forced.count, found.count)
    return Drafts(token=jnp.where(bound[:, None], forced.token, found.token), count=count)


def propose(
    config: DecoderConfig,
    how: Drafting,
    weights: Weights,
    state: DecodeState,
    rows: Rows,
    count: Int[Array, " r"],
    guessed: Drafts | None = None,
) -> tuple[DecodeState, Drafts]:
    """Draft up to `count` tokens after the newest token of every row.

    Rows with `guessed` tokens use those.
    """
    if guessed is not None:
        known = guessed.count > 0
        state, drafts = propose(config, how, weights, state, rows, jnp.where(known, 0, count))
        token = jnp.where(known[:, None], guessed.token, drafts.token)
        return state, replace(drafts, token=token, count=jnp.where(known, count, drafts.count), before=known)
    if how.drafter is None:
        return drafter.draft(config, how, weights, state, rows, count)
    if isinstance(how.drafter, Pruned):
        return drafter.draft_pruned(config, how, how.drafter, weights, state, rows, count)
    return state, guesses(how, state, rows, count)


def guesses(how: Drafting, state: DecodeState, rows: Rows, count: Int[Array, " r"]) -> Drafts:
    """Return the drafts of a lookup function: up to `count` tokens after the newest token of every row."""
    assert callable(how.drafter)
    token = how.drafter(rows.take(state.text), rows.position, how.most)
    guessed = jnp.sum(jnp.cumprod(token >= 0, axis=1), axis=1, dtype=jnp.int32)
    return Drafts(token=jnp.maximum(token, 0), count=jnp.minimum(count, guessed))


def extend_drafted(
    config: DecoderConfig,
    how: Drafting,
    weights: Weights,
    state: DecodeState,
    rows: Rows,
    drafts: Drafts,
    reading: Callable[..., tuple[DecodeState, Float[Array, "r v"], ReadStats]],
) -> tuple[DecodeState, Float[Array, "w v"], ReadStats, Rows, Int[Array, "r t1"]]:
    """Run the model on the rows and their drafts, by `reading`, in the smallest compiled width that fits them.

    Returns the state, logits and stats of every row, all rows, and the row index of each token of a slot.
    """
    widths = how.widths(config.batch)
    whole, end, at = drafting.laid_out(rows, drafts, widths[-1])
    needed = how.needed(config.batch, drafts.count)
    recorded_rows = None
    if how.pruned is not None:
        last = jnp.take_along_axis(at, drafts.count[:, None], axis=1)[:, 0]
        recorded_rows = RecordedRows(rows=last, asked=rows.run & (rows.take(state.draft.length) > 0))

    def run(
        own: PlantState, rows: Rows, recorded_rows: RecordedRows | None
    ) -> tuple[PlantState, tuple[Float[Array, "w v"], ReadStats]]:
        width = len(rows.token)
        shared = at[:, : 1 + how.ahead(width, config.batch)]
        if width == config.batch or shared.size > _MOST_CELLS * width:
            shared = None
        if recorded_rows is not None and width == config.batch:
            recorded_rows = replace(recorded_rows, rows=None)
        before = state.with_plant(MODEL, own)
        after, logits, stats = reading(config, weights, before, rows, end[:width], shared, recorded_rows)
        return after.plants[MODEL], (logits, stats)

    _, shapes = jax.eval_shape(lambda: run(state.plants[MODEL], whole, recorded_rows))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = state.plants[MODEL], blank

    def fill(carry: tuple, given: tuple) -> tuple:
        own, wide = carry
        own, found = run(own, *given)
        return own, jax.tree.map(lambda old, new: old.at[: len(new)].set(new), wide, found)

    for width, narrower in zip(widths, (0, *widths), strict=False):
        some = jax.tree.map(lambda x, width=width: x[:width], whole)
        carry = run_if((needed <= width) & (needed > narrower), fill, carry, (some, recorded_rows))
    own, (logits, stats) = carry
    return state.with_plant(MODEL, own), logits, stats, whole, at


def worked(own: Work, drafts: Drafts) -> tuple[Work, ...]:
    """Return the work of every model and position: that of verification, and with the first what drafts took."""
    if drafts.own is not None:
        own = jax.tree.map(lambda x, more: x.at[0].add(more), own, drafts.own)
    if drafts.work is None:
        return (own,)
    return own, jax.tree.map(lambda x, more: jnp.zeros_like(x).at[0].set(more), own, drafts.work)


def _price(
    models: tuple[cost.Model, ...], batch: int, active: Int[Array, ""] | int, stats: ReadStats
) -> Float[Array, " r"]:
    """Return a token's cost as laws see it: its cache reads by the active model's sizes, and a fixed share of weights.

    The weights are divided by `batch`, the most sequences of a step, and each token is charged its own experts, so that
    a law's decisions do not depend on the other sequences in the batch.
    """
    blocks, summaries = stats.blocks_read.astype(jnp.float32), stats.summaries_read.astype(jnp.float32)
    nominal = []
    for index, one in enumerate(models):
        took = stats.experts if index == MODEL else None
        experts = one.per_token if took is None else took.chosen.astype(jnp.float32)
        nominal.append(cost.cached_bytes(one, blocks, summaries) + one.weights / batch + experts * float(one.expert))
    return jnp.stack(nominal)[active]


def _priority(laws: Controller, signals: Signals, control: ControlState) -> Float[Array, ""]:
    score = laws.priority(signals, control)
    return one_like(control.priority, score, f"The priority rule {name_of(laws.priority)} returns")

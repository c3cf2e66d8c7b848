"""One step: choose, reserve, propose, extend, verify; a sequence gains a token, or several if drafts are accepted."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.base import ControlState, Signals, name_of, one_like
from et_jax.control.controller import Controller
from et_jax.control.switch import MODEL
from et_jax.decode import cost
from et_jax.decode.attention.pruned import RecordedRows
from et_jax.decode.attention.readers import BlockSparse
from et_jax.decode.attention.reads import ReadStats
from et_jax.decode.cache import kv, pages
from et_jax.decode.chunk import of_rows
from et_jax.decode.config import DecoderConfig
from et_jax.decode.drafting import drafted_rows, turns
from et_jax.decode.extend import extend
from et_jax.decode.mixing import RowRules
from et_jax.decode.output import StepOutput
from et_jax.decode.plant import Weights, check_weights, costs
from et_jax.decode.rows import Rows, at_slots
from et_jax.decode.state import DecodeState
from et_jax.decode.verify import advance, undrafted, verify
from et_jax.decode.work import by_position, no_work, of_tokens
from et_jax.types import replace


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
        guessed = drafted_rows.guessed_before(config.draft, state, rows)
        state, count = drafted_rows.reserve_drafts(config, config.draft, state, rows, guessed)
        state, drafted = drafted_rows.propose(config, config.draft, weights, state, rows, count, guessed)
        state, logits, stats, all_rows, at = drafted_rows.extend_drafted(
            config, config.draft, weights, state, rows, drafted, reading
        )
        state = drafted_rows.write_drafted_surprisals(state, rows, drafted, logits, at)
        after, outputs = verify(config, config.draft, price, state, rows, drafted, logits, stats, at)
        done = of_tokens(own, all_rows, stats.blocks_read, stats.summaries_read, stats.experts)
        produced = jax.vmap(rows.take)(outputs.produced)
        work = drafted_rows.worked(by_position(done, at, drafted.count, produced), drafted)
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
        block_mask=control.block_mask,
        selectors=own_laws.selectors(config.model.num_layers),
        min_context=own_laws.min_context,
        skipped=None if own.skipped is None else rows.take(own.skipped),
        block_mass=control.block_mass,
        refresh=control.refresh if "refresh" in config.law_sets else None,
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

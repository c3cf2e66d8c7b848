"""From logits to committed tokens: measure, sample, control, commit, one position of every row after the other."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import draft as lengths
from et_jax.control import entropy, guards
from et_jax.control.base import ControlState, Signals, updated
from et_jax.control.controller import Controller
from et_jax.decode import faults
from et_jax.decode.attention.reads import ReadStats
from et_jax.decode.cache import pages
from et_jax.decode.config import DecoderConfig
from et_jax.decode.drafting import turns
from et_jax.decode.drafting.drafts import Drafting, Drafts
from et_jax.decode.output import StepOutput
from et_jax.decode.rows import Rows
from et_jax.decode.sampling import settings as sampling
from et_jax.decode.sampling.sample import Sampled, constrained_entropy, sample
from et_jax.decode.sampling.settings import Sampling
from et_jax.decode.sampling.steering import UNLIMITED
from et_jax.decode.state import DecodeState
from et_jax.types import pytree, replace

Price = Callable[[ReadStats], Float[Array, " r"]]
"""The cost of reads for the laws, in bytes."""


@pytree
class Verdict:
    """The outcome of every row: what the laws set, and whether its token is produced.

    `fault` is above 0 if the row failed; a row that runs and does not fail has `produced` a token.
    """

    control: ControlState
    fault: Int[Array, " r"]
    produced: Bool[Array, " r"]
    finished: Bool[Array, " r"]


def advance(
    config: DecoderConfig,
    price: Price,
    state: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    stats: ReadStats,
    first: Bool[Array, ""] | bool,
) -> tuple[DecodeState, StepOutput, Verdict]:
    """Sample a token for every row that runs, and write the outcome into its slot.

    The `first` advance of a step counts waits. With two models in turns, a row whose switch activates the other
    model before its token is sampled gets no token.
    """
    signals, raw = measure(config, price, state, rows, logits, stats)
    sampled = sample(state, rows, logits, signals, raw)
    verdict = control(state, rows, sampled, raw, stats)
    switch, produced, by_small = turns.turn(state, rows, raw, verdict.produced)
    verdict = replace(verdict, produced=produced, finished=verdict.finished & produced)
    after = replace(commit(state, rows, logits, sampled, verdict, first), switch=switch)
    output = report(config, after, rows, logits, raw, sampled, verdict, stats, rows.take(state.logprobs))
    output = replace(output, by_small=rows.spread(config.num_slots, by_small))
    return after, output, verdict


def verify(
    config: DecoderConfig,
    drafting: Drafting,
    price: Price,
    state: DecodeState,
    rows: Rows,
    drafts: Drafts,
    logits: Float[Array, "w v"],
    stats: ReadStats,
    at: Int[Array, "r t1"],
) -> tuple[DecodeState, StepOutput]:
    """Sample position by position; a row continues while its token equals the drafted one.

    `at` is the row of `logits` and `stats` of each token. The sampled tokens are those without
    drafts. Returns the outputs stacked over positions; rows that have ended are undefined there. Pages of
    rejected tokens are released.
    """
    last = drafting.most
    light = replace(state, plants=())  # positions do not change the plants
    start_rows, num_rows = rows, rows.token.shape[0]
    heavy, stats = stats.heavy_blocks, replace(stats, heavy_blocks=None)

    @jax.jit  # traced once, for the shapes and for the loop: arrays are arguments, never closed over
    def one(
        i: Int[Array, ""],
        state: DecodeState,
        going: Bool[Array, " r"],
        rows: Rows,
        at: Int[Array, "r t1"],
        found: tuple[Float[Array, "w v"], ReadStats],
    ) -> tuple:
        here = at[:, i]
        rows = replace(rows, position=rows.position + i, run=going)
        logits, stats = jax.tree.map(lambda x: x[here], found)
        return advance(config, price, state, rows, logits, stats, i == 0)

    fixed = rows, at, (logits, stats)
    shapes = jax.eval_shape(one, jnp.int32(0), light, rows.run, *fixed)[1]
    outputs = jax.tree.map(lambda x: jnp.zeros((last + 1, *x.shape), x.dtype), shapes)

    def more(carry: tuple) -> Bool[Array, ""]:
        i, _, _, going, _ = carry
        return (i == 0) | ((i <= last) & jnp.any(going))

    def go_on(carry: tuple) -> tuple:
        i, state, outputs, going, accepted = carry
        state, output, verdict = one(i, state, going, *fixed)
        outputs = jax.tree.map(lambda every, this: every.at[i].set(this), outputs, output)
        guess = drafts.token[:, jnp.minimum(i, last - 1)]
        equal = verdict.produced & (i < drafts.count) & (start_rows.take(state.token) == guess)
        return i + 1, state, outputs, equal & ~verdict.finished, accepted + equal.astype(jnp.int32)

    nothing = jnp.zeros(num_rows, jnp.int32)
    _, after, outputs, _, accepted = jax.lax.while_loop(more, go_on, (jnp.int32(0), light, outputs, rows.run, nothing))
    counts = rows.spread(config.num_slots, {"drafted": drafts.count, "accepted": accepted})
    outputs = replace(outputs, **{name: getattr(outputs, name).at[0].set(each) for name, each in counts.items()})
    free = rows.take(state.allowance) == UNLIMITED  # tokens that a grammar forces say nothing about the drafter
    drafted, held = (jnp.where(free, each, 0) for each in (drafts.count, accepted))
    draft = fared(after, rows, drafted, held, drafts.before)
    needed = -(-rows.placed(rows.take(after.length)) // config.page_size)
    most = last // config.page_size + 1
    surplus = rows.spread(config.num_slots, jnp.where(rows.run, rows.take(after.table.num_blocks) - needed, 0))
    return replace(
        after,
        # every model continues from the accepted tokens
        plants=tuple(replace(plant, num_cached=jnp.minimum(plant.num_cached, after.length)) for plant in state.plants),
        draft=rows.put(after.draft, draft),
        heavy_blocks=rows.put_where(rows.run, after.heavy_blocks, heavy),
        table=pages.truncate(after.table, surplus, most),
    ), outputs


def undrafted(after: DecodeState, rows: Rows, stats: ReadStats) -> DecodeState:
    """Return the state after a step without drafts by a decoder that may draft in others."""
    nothing = jnp.zeros(len(rows.token), jnp.int32)
    return replace(
        after,
        draft=rows.put(after.draft, fared(after, rows, nothing, nothing)),
        heavy_blocks=rows.put_where(rows.run, after.heavy_blocks, stats.heavy_blocks),
    )


def fared(
    after: DecodeState,
    rows: Rows,
    count: Int[Array, " r"],
    accepted: Int[Array, " r"],
    from_before: Bool[Array, " r"] | None = None,
) -> lengths.DraftState:
    """Return the draft state of the rows after a step, each part updated by its own law.

    `count` tokens were drafted for each row, in rows `from_before` by the drafter that is tried first.
    """
    known, entropies, length = rows.take((after.draft, after.signals.entropy, after.length))
    cached = rows.placed(length)

    def moved(law: lengths.DraftLength, draft: lengths.DraftState, own: Bool[Array, " r"] | bool) -> lengths.DraftState:
        updated = jax.vmap(partial(lengths.updated, law))
        drafted, correct = (jnp.where(own, each, 0) for each in (count, accepted))
        return updated(draft, rows.run, drafted, correct, entropies, cached)

    if from_before is None or known.before is None:
        return moved(after.draft_laws[0], known, True)
    own, before = after.draft_laws
    return replace(moved(own, known, ~from_before), before=moved(before, known.before, from_before))


@jax.named_scope("measure")
def measure(
    config: DecoderConfig,
    price: Price,
    state: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    stats: ReadStats,
) -> tuple[Signals, entropy.Moments]:
    """Return the raw signals of this step, before sampling, and the moments of the unmodified logits."""
    raw = entropy.moments(logits)
    at = config.calibration.temperature
    calibrated = raw if at == 1.0 else entropy.moments(logits, at)
    log_prob = entropy.log_probabilities(logits, calibrated, at)
    estimate = rows.take(state.laws).estimator(log_prob, calibrated)
    generated = rows.take(state.generated) + 1
    ran, scored = rows.run.astype(jnp.int32), stats.num_entropies > 0
    signals = replace(
        rows.take(state.signals),
        entropy=estimate.entropy,
        varentropy=entropy.varentropy(calibrated),
        entropy_low=estimate.low,
        entropy_high=estimate.high,
        margin=entropy.margin(logits, raw),
        constrained_entropy=constrained_entropy(state, rows, logits, at, estimate.entropy),
        kept_mass=stats.kept_mass,
        attention_entropy=jnp.where(scored, stats.entropies / jnp.maximum(stats.num_entropies, 1.0), jnp.nan),
        least_attention_entropy=jnp.where(scored, stats.least_entropy, jnp.nan),
        blocks_read=stats.blocks_read,
        summaries_read=stats.summaries_read,
        cost=price(stats),
        length=rows.position + ran,
        generated=generated,
        remaining=rows.take(state.limit) - generated,
        arrival=rows.take(state.arrival),
        allocated_pages=-(-(rows.place + ran) // config.page_size),
        urgency=rows.take(state.urgency),
    )
    return signals, raw


@jax.named_scope("control")
def control(state: DecodeState, rows: Rows, sampled: Sampled, raw: entropy.Moments, stats: ReadStats) -> Verdict:
    """Run the laws on every row, and check the result; greedy requests stay greedy under every law."""
    before, settings, signals = rows.take(state.control), rows.take(state.sampling), sampled.signals
    mass = None if before.block_mass is None else stats.block_masses
    mask, total = stats.block_masks, before.total_cost + signals.cost
    read = replace(before, block_mask=mask, block_mass=mass, total_cost=total)
    decided = _cold(settings, jax.vmap(_after_token)(rows.take(state.laws), signals, read))
    found = faults.fault(raw.s0, sampled.temperature, sampled.moments, _cold(settings, before), decided)
    fault = jnp.where(rows.run, found, 0)
    produced = rows.run & (fault == 0)
    stopped = jnp.any(sampled.token[:, None] == rows.take(state.stop_ids), axis=1)
    ended = stopped | (signals.generated >= rows.take(state.limit))
    return Verdict(control=decided, fault=fault, produced=produced, finished=produced & ended)


@jax.named_scope("commit")
def commit(
    state: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    sampled: Sampled,
    verdict: Verdict,
    first: Bool[Array, ""] | bool,
) -> DecodeState:
    """Write the rows' results back into their slots if a token was produced; the others keep waiting."""
    paused = ~jnp.asarray(first) | (state.active & ~state.runnable)
    waited = jnp.where(paused, state.control.wait, jnp.where(state.active, state.control.wait + 1, 0))
    slots = (state.token, state.length, state.generated, state.signals, state.logits)
    new = (
        sampled.token,
        rows.position + 1,
        sampled.signals.generated,
        sampled.signals,
        None if state.logits is None else logits,
    )
    token, length, generated, signals, last = rows.put_where(verdict.produced, slots, new)
    decided = replace(verdict.control, wait=jnp.zeros_like(verdict.control.wait))
    stays = rows.take(state.active) & ~verdict.finished & (verdict.fault == 0)
    counts = state.counts
    if counts is not None:
        counts = sampling.count(counts, rows.slot, sampled.token, verdict.produced)
    slot = jnp.arange(len(state.text)) if rows.slot is None else rows.slot
    place = jnp.where(verdict.produced, rows.position + 1, state.text.shape[1])
    allowance = rows.take(state.allowance)
    spent = (verdict.produced & (allowance < UNLIMITED)).astype(jnp.int32)
    return replace(
        state,
        text=state.text.at[slot, place].set(sampled.token, mode="drop"),
        token=token,
        length=length,
        generated=generated,
        active=rows.put(state.active, stays),
        allowance=rows.put(state.allowance, allowance - spent),
        counts=counts,
        signals=signals,
        logits=last,
        control=rows.put_where(verdict.produced, replace(state.control, wait=waited), decided),
    )


def report(
    config: DecoderConfig,
    after: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    raw: entropy.Moments,
    sampled: Sampled,
    verdict: Verdict,
    stats: ReadStats,
    logprobs: Bool[Array, " r"],
) -> StepOutput:
    """Return what the step did, slot by slot; rows with `logprobs` request alternatives of their tokens."""
    top = _alternatives(config, logits, rows.run & logprobs)
    if top is not None:
        top = rows.spread(config.num_slots, (top[0] - entropy.log_normaliser(raw)[:, None], top[1]))
    fields = (verdict.produced, verdict.finished, verdict.fault, sampled.temperature)
    produced, finished, fault, temperature = rows.spread(config.num_slots, fields)
    return StepOutput(
        token=after.token,
        produced=produced,
        finished=finished,
        fault=fault,
        refused=jnp.zeros_like(produced),
        temperature=temperature,
        entropic_time=after.control.entropic_time,
        total_cost=after.control.total_cost,
        drafted=jnp.zeros_like(fault),
        accepted=jnp.zeros_like(fault),
        guard_rates=guards.rates(after.control),
        signals=after.signals,
        top_tokens=None if top is None else top[1],
        top_logprobs=None if top is None else top[0],
        reads=rows.spread(config.num_slots, stats.reads) if config.trace_reads else None,
    )


def _alternatives(
    config: DecoderConfig, logits: Float[Array, "r v"], asked: Bool[Array, " r"]
) -> tuple[Float[Array, "r a"], Int[Array, "r a"]] | None:
    """Return the greatest logits and their tokens, or zeros if no row asks; None if the decoder reports none."""
    if not config.num_logprobs:
        return None
    shape = logits.shape[0], config.num_logprobs
    nothing = jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32)
    return jax.lax.cond(jnp.any(asked), lambda: tuple(jax.lax.top_k(logits, config.num_logprobs)), lambda: nothing)


def _after_token(laws: Controller, signals: Signals, control: ControlState) -> ControlState:
    return updated(laws.law, signals, control)


def _cold(settings: Sampling, control: ControlState) -> ControlState:
    """Return the control state with temperature 0 if the request is greedy."""
    return replace(control, temperature=jnp.where(settings.temperature == 0, 0.0, control.temperature))

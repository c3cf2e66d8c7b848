"""One token for every sequence served: choose, reserve, extend, measure, sample, control, commit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy, guards
from et_jax.control.base import ControlState, Signals, name_of, one_like, updated
from et_jax.control.controller import Controller
from et_jax.decode import cache as kv
from et_jax.decode import cost, faults, pages, sampling
from et_jax.decode.attention import LayerCarry, ReadRow, ReadStats, decode_attend, no_reads
from et_jax.decode.rows import Rows, at_slots
from et_jax.decode.sample import Sampled, sample
from et_jax.decode.sampling import Sampling
from et_jax.decode.state import DecoderConfig, DecodeState, StepOutput
from et_jax.models.transformer import Params, forward
from et_jax.types import pytree, replace


def step(config: DecoderConfig, params: Params, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """Advance the sequences served by one token.

    choose -> reserve -> extend -> measure -> sample -> control -> commit. A slot that got no page is
    refused: no token, and its clock, key and control are unchanged.
    """
    state, chosen = choose(config, state)
    table, rows = reserve(config, state, chosen)
    logits, memory = extend(config, params, state, rows, table)
    signals, raw = measure(config, params, state, rows, logits, memory.stats)
    sampled = sample(state, rows, logits, signals, raw)
    verdict = control(state, rows, sampled, raw, memory.stats)
    after = commit(replace(state, table=table, cache=memory.cache), rows, logits, sampled, verdict)
    return after, report(config, state, after, rows, logits, raw, sampled, verdict)


@pytree
class Verdict:
    """What becomes of every row: what the laws decide, and whether its token stands.

    `fault` is above 0 where the row failed; a row that runs and does not fail has `produced` a token.
    """

    control: ControlState
    fault: Int[Array, " r"]
    produced: Bool[Array, " r"]
    finished: Bool[Array, " r"]


@jax.named_scope("choose")
def choose(config: DecoderConfig, state: DecodeState) -> tuple[DecodeState, Rows]:
    """Score every slot, and take the `batch` runnable ones of highest priority.

    A priority that is no number comes first, and ends its sequence; the lowest stays above idle slots.
    """
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
        score = jnp.where(state.active, jnp.maximum(score, jnp.finfo(score.dtype).min), -jnp.inf)
        slot = jax.lax.top_k(score, config.batch)[1]
    token, position, active = at_slots(slot, (state.token, state.length, state.active))
    rows = Rows(slot=slot, token=token, position=position, run=active)
    return replace(state, control=replace(state.control, priority=priority)), rows


@jax.named_scope("reserve")
def reserve(config: DecoderConfig, state: DecodeState, rows: Rows) -> tuple[pages.PageTable, Rows]:
    """Find a page for every token to be written; a row that got none does not run."""
    wanted = jnp.where(rows.run, rows.position // config.page_size + 1, 0)
    table, granted = pages.reserve(state.table, rows.spread(config.num_slots, wanted), 1)
    return table, replace(rows, run=rows.run & rows.take(granted))


@jax.named_scope("extend")
def extend(
    config: DecoderConfig, params: Params, state: DecodeState, rows: Rows, table: pages.PageTable
) -> tuple[Float[Array, "r v"], LayerCarry]:
    """Write the rows' tokens into the cache and read it: the logits of what comes next, and what was read."""
    control = rows.take(state.control)
    row = ReadRow(
        table=rows.take(table.pages),
        length=rows.position,
        run=rows.run,
        tolerance=control.tolerance,
        fresh=rows.take(state.generated) % config.controller.refresh_every == 0,
        block_mask=control.block_mask,
        kept_mass=rows.take(state.signals.kept_mass),
        selectors=rows.take(state.laws).selectors(config.model.num_layers),
    )
    cache = state.cache
    if cache.surprisal is not None:
        surprisal = jnp.where(rows.position == 0, 0.0, entropy.surprisal(rows.take(state.logits), rows.token))
        cache = kv.write_surprisal(cache, surprisal[:, None], row.table, row.length, row.run.astype(jnp.int32))
    attend = decode_attend(config.read_policy, row)
    memory = LayerCarry(cache=cache, stats=no_reads(config.batch))
    logits, memory = forward(params, config.model, rows.token[:, None], rows.position[:, None], attend, memory)
    return logits[:, 0], memory


@jax.named_scope("measure")
def measure(
    config: DecoderConfig,
    params: Params,
    state: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    stats: ReadStats,
) -> tuple[Signals, entropy.Moments]:
    """Return the raw signals of this step, before sampling, and the moments of the logits as they are."""
    raw = entropy.moments(logits)
    at = config.calibration.temperature
    calibrated = raw if at == 1.0 else entropy.moments(logits, at)
    log_prob = logits / at - entropy.log_normaliser(calibrated, at)[:, None]
    estimate = rows.take(state.laws).estimator(log_prob, calibrated)
    generated = rows.take(state.generated) + 1
    length, looked = rows.position + rows.run.astype(jnp.int32), stats.num_entropies > 0
    signals = replace(
        rows.take(state.signals),
        entropy=estimate.entropy,
        varentropy=entropy.varentropy(calibrated),
        entropy_low=estimate.low,
        entropy_high=estimate.high,
        margin=entropy.margin(logits, raw),
        kept_mass=stats.kept_mass,
        attention_entropy=jnp.where(looked, stats.entropies / jnp.maximum(stats.num_entropies, 1.0), jnp.nan),
        least_attention_entropy=jnp.where(looked, stats.least_entropy, jnp.nan),
        blocks_read=stats.blocks_read,
        summaries_read=stats.summaries_read,
        cost=cost.nominal_bytes(traffic(params, state.cache), config.batch, stats.blocks_read, stats.summaries_read),
        length=length,
        generated=generated,
        remaining=rows.take(state.limit) - generated,
        arrival=rows.take(state.arrival),
        pages_held=-(-length // config.page_size),
        urgency=rows.take(state.urgency),
    )
    return signals, raw


@jax.named_scope("control")
def control(state: DecodeState, rows: Rows, sampled: Sampled, raw: entropy.Moments, stats: ReadStats) -> Verdict:
    """Run the laws on every row, and judge it; greedy requests stay greedy under every law."""
    before, settings, signals = rows.take(state.control), rows.take(state.sampling), sampled.signals
    read = replace(before, block_mask=jnp.stack(stats.block_masks, axis=1), total_cost=before.total_cost + signals.cost)
    decided = _cold(settings, jax.vmap(_after_token)(rows.take(state.laws), signals, read))
    found = faults.fault(raw.s0, sampled.temperature, _cold(settings, before), decided)
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
) -> DecodeState:
    """Put what the rows came to back into their slots, where a token was produced; the others wait on."""
    waited = jnp.where(state.active, state.control.wait + 1, 0)
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
    return replace(
        state,
        token=token,
        length=length,
        generated=generated,
        active=rows.put(state.active, stays),
        counts=counts,
        signals=signals,
        logits=last,
        control=rows.put_where(verdict.produced, replace(state.control, wait=waited), decided),
    )


def report(
    config: DecoderConfig,
    before: DecodeState,
    after: DecodeState,
    rows: Rows,
    logits: Float[Array, "r v"],
    raw: entropy.Moments,
    sampled: Sampled,
    verdict: Verdict,
) -> StepOutput:
    """Return what the step did, slot by slot."""
    refused = rows.take(before.active) & ~rows.run
    top = _alternatives(config, logits, rows.run & rows.take(before.logprobs))
    if top is not None:
        top = rows.spread(config.num_slots, (top[0] - entropy.log_normaliser(raw)[:, None], top[1]))
    told = (verdict.produced, verdict.finished, verdict.fault, refused, sampled.temperature)
    produced, finished, fault, refused, temperature = rows.spread(config.num_slots, told)
    return StepOutput(
        token=after.token,
        produced=produced,
        finished=finished,
        fault=fault,
        refused=refused,
        temperature=temperature,
        entropic_time=after.control.entropic_time,
        total_cost=after.control.total_cost,
        guard_rates=guards.rates(after.control),
        signals=after.signals,
        top_tokens=None if top is None else top[1],
        top_logprobs=None if top is None else top[0],
    )


def traffic(params: Params, cache: kv.KVCache) -> cost.Traffic:
    """Return the bytes of what a step may read."""
    layer = cache.layers[0]
    num_blocks = layer.pages.shape[0] * layer.pages.shape[1]
    return cost.Traffic(
        weights=cost.num_bytes(params),
        block=cost.num_bytes(layer.pages) // num_blocks,
        summary=cost.num_bytes((layer.summary, layer.key_codes)) // num_blocks,
    )


def _alternatives(
    config: DecoderConfig, logits: Float[Array, "r v"], asked: Bool[Array, " r"]
) -> tuple[Float[Array, "r a"], Int[Array, "r a"]] | None:
    """The greatest logits and their tokens, or zeros where no row asks; None where the decoder reports none."""
    if not config.num_logprobs:
        return None
    shape = logits.shape[0], config.num_logprobs
    nothing = jnp.zeros(shape, logits.dtype), jnp.zeros(shape, jnp.int32)
    return jax.lax.cond(jnp.any(asked), lambda: tuple(jax.lax.top_k(logits, config.num_logprobs)), lambda: nothing)


def _priority(laws: Controller, signals: Signals, control: ControlState) -> Float[Array, ""]:
    score = laws.priority(signals, control)
    return one_like(control.priority, score, f"The priority rule {name_of(laws.priority)} returns")


def _after_token(laws: Controller, signals: Signals, control: ControlState) -> ControlState:
    return updated(laws.law, signals, control)


def _cold(settings: Sampling, control: ControlState) -> ControlState:
    """The control state with temperature 0 where the request is greedy."""
    return replace(control, temperature=jnp.where(settings.temperature == 0, 0.0, control.temperature))

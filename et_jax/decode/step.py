"""One token for every sequence served: choose, reserve, forward, measure, sample, control, scatter."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy, guards
from et_jax.control.base import ControlState, Signals, name_of, one_like, updated
from et_jax.control.controller import Controller
from et_jax.decode import cache as kv
from et_jax.decode import cost, faults, pages, sampling
from et_jax.decode.attention import LayerCarry, ReadStats, Row, decode_attend, no_reads
from et_jax.decode.sample import sample
from et_jax.decode.sampling import Sampling, TokenCounts
from et_jax.decode.state import DecoderConfig, DecodeState, StepOutput
from et_jax.models.transformer import Params, forward
from et_jax.types import replace


def step(config: DecoderConfig, params: Params, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """Advance the sequences served by one token.

    choose -> reserve -> forward -> measure -> sample -> control -> scatter. A slot that got no page is
    refused: no token, and its clock, key and control are unchanged.
    """
    state = _prioritise(config, state)
    rows = _choose(config, state)
    served = _take(state.active, rows)
    length = _take(state.length, rows)
    wanted = jnp.where(served, length // config.page_size + 1, 0)
    table, granted = pages.reserve(state.table, _scatter(jnp.zeros_like(state.length), rows, wanted), 1)
    run = served & _take(granted, rows)

    token, laws = _take(state.token, rows), _take(state.laws, rows)
    row = Row(
        table=_take(table.pages, rows),
        length=length,
        run=run,
        tolerance=_take(state.control.tolerance, rows),
        fresh=_take(state.generated, rows) % config.controller.refresh_every == 0,
        block_mask=_take(state.control.block_mask, rows),
        kept_mass=_take(state.signals.kept_mass, rows),
        selectors=laws.selectors(config.model.num_layers),
    )
    cache = state.cache
    if cache.surprisal is not None:
        surprisal = jnp.where(length == 0, 0.0, entropy.surprisal(_take(state.logits, rows), token))
        cache = kv.write_surprisal(cache, surprisal[:, None], row.table, length, run.astype(jnp.int32))
    attend = decode_attend(config.read_policy, row)
    memory = LayerCarry(cache=cache, stats=no_reads(config.batch))
    logits, memory = forward(params, config.model, token[:, None], length[:, None], attend, memory)
    logits = logits[:, 0]

    with jax.named_scope("control"):
        control = _take(state.control, rows)
        settings = _take(state.sampling, rows)
        signals, raw = _measure(config, params, state, rows, run, logits, memory.stats, laws)
        normaliser = entropy.log_normaliser(raw)
        rule = laws.temperature_rule
        penalised = run & sampling.penalises(settings)
        altered = _penalise(state.counts, rows, logits, settings, penalised)
        sampled = sample(rule, altered, settings, penalised, signals, control, length + 1, raw)
        logit = jnp.take_along_axis(logits, sampled.token[:, None], axis=1)[:, 0]
        signals = replace(sampled.signals, surprisal=normaliser - logit)
        masks = jnp.stack(memory.stats.block_masks, axis=1)
        decided = _decide(laws, settings, signals, replace(control, block_mask=masks))
        fault = jnp.where(run, faults.fault(raw.s0, sampled.temperature, _cold(settings, control), decided), 0)
        failed = fault > 0
        produced = run & ~failed

    stopped = jnp.any(sampled.token[:, None] == _take(state.stop_ids, rows), axis=1)
    finished = produced & (stopped | (signals.generated >= _take(state.limit, rows)))

    def put(tree: Any, new: Any) -> Any:
        return jax.tree.map(lambda old, x: _scatter(old, rows, _where(produced, x, _take(old, rows))), tree, new)

    waited = jnp.where(state.active, state.control.wait + 1, 0)
    every = jnp.zeros(config.num_slots, bool)
    after = replace(
        state,
        token=put(state.token, sampled.token),
        length=put(state.length, length + 1),
        generated=put(state.generated, signals.generated),
        active=_scatter(state.active, rows, _take(state.active, rows) & ~finished & ~failed),
        counts=None if state.counts is None else sampling.count(state.counts, rows, sampled.token, produced),
        signals=put(state.signals, signals),
        logits=put(state.logits, None if state.logits is None else logits),
        control=put(replace(state.control, wait=waited), replace(decided, wait=jnp.zeros_like(decided.wait))),
        table=table,
        cache=memory.cache,
    )
    top = _alternatives(config, logits, run & _take(state.logprobs, rows))
    output = StepOutput(
        token=after.token,
        produced=_scatter(every, rows, produced),
        finished=_scatter(every, rows, finished),
        fault=_scatter(jnp.zeros_like(state.length), rows, fault),
        refused=_scatter(every, rows, served & ~run),
        temperature=_scatter(jnp.zeros_like(state.control.temperature), rows, sampled.temperature),
        entropic_time=after.control.entropic_time,
        total_cost=after.control.total_cost,
        guard_rates=guards.rates(after.control),
        signals=after.signals,
        top_tokens=None if top is None else _spread(config, rows, top[1]),
        top_logprobs=None if top is None else _spread(config, rows, top[0] - normaliser[:, None]),
    )
    return after, output


def traffic(params: Params, cache: kv.KVCache) -> cost.Traffic:
    """Return the bytes of what a step may read."""
    layer = cache.layers[0]
    num_blocks = layer.pages.shape[0] * layer.pages.shape[1]
    return cost.Traffic(
        weights=cost.num_bytes(params),
        block=cost.num_bytes(layer.pages) // num_blocks,
        summary=cost.num_bytes((layer.summary, layer.key_codes)) // num_blocks,
    )


# The parts of a step.


def _take(tree: Any, rows: Int[Array, " r"] | None) -> Any:
    """The rows a step serves; None is all of them, in place."""
    return tree if rows is None else jax.tree.map(lambda x: x[rows], tree)


def _scatter(x: Array, rows: Int[Array, " r"] | None, new: Array) -> Array:
    return new if rows is None else x.at[rows].set(new)


def _spread(config: DecoderConfig, rows: Int[Array, " r"] | None, new: Array) -> Array:
    return _scatter(jnp.zeros((config.num_slots, *new.shape[1:]), new.dtype), rows, new)


def _where(keep: Bool[Array, " r"], new: Array, old: Array) -> Array:
    return jnp.where(keep.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _prioritise(config: DecoderConfig, state: DecodeState) -> DecodeState:
    """Score every slot."""
    signals = replace(
        state.signals,
        length=state.length,
        generated=state.generated,
        remaining=state.limit - state.generated,
        arrival=state.arrival,
        pages_held=state.table.num_blocks,
        urgency=state.urgency,
    )

    def priority(laws: Controller, signals: Signals, control: ControlState) -> Float[Array, ""]:
        score = laws.priority(signals, control)
        return one_like(control.priority, score, f"The priority rule {name_of(laws.priority)} returns")

    score = jax.vmap(priority)(state.laws, signals, state.control)
    return replace(state, control=replace(state.control, priority=score))


def _choose(config: DecoderConfig, state: DecodeState) -> Int[Array, " r"] | None:
    """The `batch` runnable slots of highest priority, or None when every slot advances.

    A priority that is no number comes first, and ends its sequence; the lowest stays above idle slots.
    """
    if config.batch == config.num_slots:
        return None
    score = jnp.where(jnp.isnan(state.control.priority), jnp.inf, state.control.priority)
    priority = jnp.where(state.active, jnp.maximum(score, jnp.finfo(score.dtype).min), -jnp.inf)
    return jax.lax.top_k(priority, config.batch)[1]


def _penalise(
    counts: TokenCounts | None,
    rows: Int[Array, " r"] | None,
    logits: Float[Array, "r v"],
    settings: Sampling,
    penalised: Bool[Array, " r"],
) -> Float[Array, "r v"]:
    """The logits after penalties; the counts are looked at only where a row asks for one."""
    if counts is None:
        return logits
    return jax.lax.cond(
        jnp.any(penalised),
        lambda: sampling.penalise(logits, settings, _take(counts, rows)),
        lambda: logits,
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


def _measure(
    config: DecoderConfig,
    params: Params,
    state: DecodeState,
    rows: Int[Array, " r"] | None,
    run: Bool[Array, " r"],
    logits: Float[Array, "r v"],
    stats: ReadStats,
    laws: Controller,
) -> tuple[Signals, entropy.Moments]:
    """The raw signals of this step, before sampling, and the moments of the logits as they are."""
    raw = entropy.moments(logits)
    at = config.calibration
    calibrated = raw if at == 1.0 else entropy.moments(logits, at)
    log_prob = logits / at - entropy.log_normaliser(calibrated, at)[:, None]
    estimate = laws.estimator(log_prob, calibrated)
    generated = _take(state.generated, rows) + 1
    length = _take(state.length, rows) + run.astype(jnp.int32)
    signals = replace(
        _take(state.signals, rows),
        entropy=estimate.entropy,
        varentropy=entropy.varentropy(calibrated),
        entropy_low=estimate.low,
        entropy_high=estimate.high,
        margin=entropy.margin(logits, raw),
        kept_mass=stats.kept_mass,
        blocks_read=stats.blocks_read,
        summaries_read=stats.summaries_read,
        cost=cost.nominal_bytes(traffic(params, state.cache), config.batch, stats.blocks_read, stats.summaries_read),
        length=length,
        generated=generated,
        remaining=_take(state.limit, rows) - generated,
        arrival=_take(state.arrival, rows),
        pages_held=-(-length // config.page_size),
        urgency=_take(state.urgency, rows),
    )
    return signals, raw


def _decide(laws: Controller, settings: Sampling, signals: Signals, control: ControlState) -> ControlState:
    """Run the laws on every row; greedy requests stay greedy under every law."""
    control = replace(control, total_cost=control.total_cost + signals.cost)
    return _cold(settings, jax.vmap(_after_token)(laws, signals, control))


def _after_token(laws: Controller, signals: Signals, control: ControlState) -> ControlState:
    return updated(laws.law, signals, control)


def _cold(settings: Sampling, control: ControlState) -> ControlState:
    """The control state with temperature 0 where the request is greedy."""
    return replace(control, temperature=jnp.where(settings.temperature == 0, 0.0, control.temperature))

"""The hall: the pure functions that carry a sequence from prompt to text.

    prefill -> insert -> step, step, step -> release

Every function takes a state and returns a state. `decoder` binds the static configuration and jits
them with the state donated, so that the cache is updated in place.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax import cache as kv
from et_jax import cost, entropy, faults, pages, sampling, slots
from et_jax.attend import Memory, Receipts, Row, decode_attend, prefill_attend, start_receipts
from et_jax.control import guards
from et_jax.control.base import ControlState, Signals
from et_jax.drawing import draw
from et_jax.models.transformer import Params, forward
from et_jax.sampling import Sampling, TokenCounts
from et_jax.state import DecoderConfig, DecodeState, Request, StepOutput, empty
from et_jax.types import replace


def prefill(
    config: DecoderConfig,
    params: Params,
    state: DecodeState,
    slot: Int[Array, " r"],
    tokens: Int[Array, "r t"],
    count: Int[Array, " r"],
) -> tuple[DecodeState, Bool[Array, " r"]]:
    """Write the next prompt tokens of inactive slots into the cache; False where pages ran out.

    Each row is a part of a prompt: the first `count` of its tokens, then padding. Parts of one prompt
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
    attend = prefill_attend(config.reading, table.pages[slot], start, written, end)
    positions = start[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    logits, cache = forward(params, config.model, tokens, positions, attend, state.cache)
    last = state.logits
    if last is not None:
        final = logits[index, jnp.maximum(count - 1, 0)]
        first = jnp.where((before > 0)[:, None], jnp.roll(final, 1, axis=0), last[slot])
        given = jnp.concatenate([first[:, None], logits[:, :-1]], axis=1)
        surprisal = jnp.where(positions == 0, 0.0, _surprisal(given, tokens))
        cache = kv.write_surprisal(cache, surprisal, table.pages[slot], start, written)
        ends = (written > 0) & (before + count == total)
        last = last.at[jnp.where(ends, slot, config.num_slots)].set(final, mode="drop")
    return replace(state, table=table, cache=cache, logits=last, length=state.length.at[slot].add(written)), granted


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

    token = _take(state.token, rows)
    row = Row(
        table=_take(table.pages, rows),
        length=length,
        run=run,
        tolerance=_take(state.control.tolerance, rows),
        fresh=_take(state.generated, rows) % config.controller.refresh_every == 0,
        block_mask=_take(state.control.block_mask, rows),
        kept_mass=_take(state.signals.kept_mass, rows),
    )
    cache = state.cache
    if state.logits is not None:
        surprisal = jnp.where(length == 0, 0.0, _surprisal(_take(state.logits, rows), token))
        cache = kv.write_surprisal(cache, surprisal[:, None], row.table, length, run.astype(jnp.int32))
    attend = decode_attend(config.reading, row)
    memory = Memory(cache=cache, receipts=start_receipts(config.batch))
    logits, memory = forward(params, config.model, token[:, None], length[:, None], attend, memory)
    logits = logits[:, 0]

    with jax.named_scope("control"):
        control = _take(state.control, rows)
        settings = _take(state.sampling, rows)
        signals, raw = _measure(config, params, state, rows, run, logits, memory.receipts)
        normaliser = entropy.log_normaliser(raw)
        rule = config.controller.temperature_rule
        penalised = run & sampling.penalises(settings)
        altered = _penalise(state.counts, rows, logits, settings, penalised)
        drawn = draw(rule, altered, settings, penalised, signals, control, length + 1, raw)
        logit = jnp.take_along_axis(logits, drawn.token[:, None], axis=1)[:, 0]
        signals = replace(drawn.signals, surprisal=normaliser - logit)
        masks = jnp.stack(memory.receipts.block_masks, axis=1)
        decided = _decide(config, settings, signals, replace(control, block_mask=masks))
        fault = jnp.where(run, faults.fault(raw.s0, drawn.temperature, _cold(settings, control), decided), 0)
        failed = fault > 0
        produced = run & ~failed

    stopped = jnp.any(drawn.token[:, None] == _take(state.stop_ids, rows), axis=1)
    finished = produced & (stopped | (signals.generated >= _take(state.limit, rows)))

    def put(tree: Any, new: Any) -> Any:
        return jax.tree.map(lambda old, x: _scatter(old, rows, _where(produced, x, _take(old, rows))), tree, new)

    waited = jnp.where(state.active, state.control.wait + 1, 0)
    every = jnp.zeros(config.num_slots, bool)
    after = replace(
        state,
        token=put(state.token, drawn.token),
        length=put(state.length, length + 1),
        generated=put(state.generated, signals.generated),
        active=_scatter(state.active, rows, _take(state.active, rows) & ~finished & ~failed),
        counts=None if state.counts is None else sampling.count(state.counts, rows, drawn.token, produced),
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
        temperature=_scatter(jnp.zeros_like(state.control.temperature), rows, drawn.temperature),
        entropic_time=after.control.entropic_time,
        total_cost=after.control.total_cost,
        guard_rates=guards.rates(after.control),
        signals=after.signals,
        top_tokens=None if top is None else _spread(config, rows, top[1]),
        top_logprobs=None if top is None else _spread(config, rows, top[0] - normaliser[:, None]),
    )
    return after, output


def decode(
    config: DecoderConfig,
    params: Params,
    state: DecodeState,
    num_steps: Int[Array, ""],
    until_end: Bool[Array, ""] | bool = False,
) -> tuple[DecodeState, StepOutput, Int[Array, ""]]:
    """Run up to `num_steps` steps (at most `max_steps`) on the device, stopping early when no slot is active.

    With `until_end` it also stops after a step that ends a sequence, whose slot somebody may be waiting
    for. Returns the outputs stacked over `max_steps`, of which the returned number were run.
    """
    _, shapes = jax.eval_shape(partial(step, config), params, state)
    outputs = jax.tree.map(lambda x: jnp.zeros((config.max_steps, *x.shape), x.dtype), shapes)
    num_steps = jnp.minimum(num_steps, config.max_steps)

    def going(carry: tuple) -> Bool[Array, ""]:
        i, state, _, ended = carry
        return (i < num_steps) & jnp.any(state.active) & ~(ended & until_end)

    def advance(carry: tuple) -> tuple:
        i, state, outputs, _ = carry
        state, output = step(config, params, state)
        outputs = jax.tree.map(lambda all_, x: all_.at[i].set(x), outputs, output)
        return i + 1, state, outputs, jnp.any(output.finished | (output.fault > 0))

    start = jnp.int32(0), state, outputs, jnp.bool_(False)
    ran, state, outputs, _ = jax.lax.while_loop(going, advance, start)
    return state, outputs, ran


def snapshot(state: DecodeState) -> DecodeState:
    """Return a copy that outlives a donating step."""
    return jax.tree.map(jnp.copy, state)


def traffic(params: Params, cache: kv.KVCache) -> cost.Traffic:
    """Return the bytes of what a step may read."""
    layer = cache.layers[0]
    num_blocks = layer.pages.shape[0] * layer.pages.shape[1]
    return cost.Traffic(
        weights=cost.num_bytes(params),
        block=cost.num_bytes(layer.pages) // num_blocks,
        summary=cost.num_bytes((layer.summary, layer.key_codes)) // num_blocks,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """The functions of this module and of `slots`, their configuration bound, jitted.

    The state that a function returns anew is donated to it.
    """

    config: DecoderConfig
    empty: Callable[[], DecodeState]
    prefill: Callable[[Params, DecodeState, Any, Any, Any], tuple[DecodeState, Bool[Array, ""]]]
    insert: Callable[[DecodeState, Any, Request], DecodeState]
    step: Callable[[Params, DecodeState], tuple[DecodeState, StepOutput]]
    decode: Callable[..., tuple[DecodeState, StepOutput, Int[Array, ""]]]
    release: Callable[[DecodeState, Any], DecodeState]
    fork: Callable[[DecodeState, Any, Any], tuple[DecodeState, Bool[Array, ""]]]
    adopt: Callable[[DecodeState, Any, Any, Any], DecodeState]
    hold: Callable[[DecodeState, Any, Any], DecodeState]
    drop: Callable[[DecodeState, Any, Any], DecodeState]
    read_row: Callable[[DecodeState, Any], slots.Row]
    read_pages: Callable[[DecodeState, Any, Any], kv.KVCache]
    write_row: Callable[[DecodeState, Any, slots.Row], tuple[DecodeState, Bool[Array, ""]]]
    write_pages: Callable[[DecodeState, Any, Any, kv.KVCache], DecodeState]


def decoder(config: DecoderConfig) -> Decoder:
    """Return the decoder of a configuration."""

    def compiled(function: Callable, *bound: Any, donate: int | None = None) -> Callable:
        own = partial(function, *bound)  # a function of its own, for what `jax.jit` keeps is kept by function
        return jax.jit(own) if donate is None else jax.jit(own, donate_argnums=donate)

    return Decoder(
        config=config,
        empty=compiled(empty, config),
        prefill=compiled(prefill, config, donate=1),
        insert=compiled(slots.insert, config, donate=0),
        step=compiled(step, config, donate=1),
        decode=compiled(decode, config, donate=1),
        release=compiled(slots.release, donate=0),
        fork=compiled(slots.fork, config, donate=0),
        adopt=compiled(slots.adopt, donate=0),
        hold=compiled(slots.hold, donate=0),
        drop=compiled(slots.drop, donate=0),
        read_row=compiled(slots.read_row),
        read_pages=compiled(slots.read_pages, config),
        write_row=compiled(slots.write_row, config, donate=0),
        write_pages=compiled(slots.write_pages, config, donate=0),
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
    score = jax.vmap(config.controller.priority)(signals, state.control)
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


def _surprisal(logits: Float[Array, "*r v"], token: Int[Array, "*r"]) -> Float[Array, "*r"]:
    """-log p of each row's token, in nats, under the logits that came before it."""
    logit = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return entropy.log_normaliser(entropy.moments(logits)) - logit


def _measure(
    config: DecoderConfig,
    params: Params,
    state: DecodeState,
    rows: Int[Array, " r"] | None,
    run: Bool[Array, " r"],
    logits: Float[Array, "r v"],
    receipts: Receipts,
) -> tuple[Signals, entropy.Moments]:
    """The raw signals of this step, before sampling, and the moments of the logits as they are."""
    raw = entropy.moments(logits)
    at = config.calibration
    calibrated = raw if at == 1.0 else entropy.moments(logits, at)
    log_prob = logits / at - entropy.log_normaliser(calibrated, at)[:, None]
    estimate = config.controller.estimator(log_prob, calibrated)
    generated = _take(state.generated, rows) + 1
    length = _take(state.length, rows) + run.astype(jnp.int32)
    signals = replace(
        _take(state.signals, rows),
        entropy=estimate.entropy,
        varentropy=entropy.varentropy(calibrated),
        entropy_low=estimate.low,
        entropy_high=estimate.high,
        margin=entropy.margin(logits, raw),
        kept_mass=receipts.kept_mass,
        blocks_read=receipts.blocks_read,
        summaries_read=receipts.summaries_read,
        cost=cost.nominal_bytes(
            traffic(params, state.cache), config.batch, receipts.blocks_read, receipts.summaries_read
        ),
        length=length,
        generated=generated,
        remaining=_take(state.limit, rows) - generated,
        arrival=_take(state.arrival, rows),
        pages_held=-(-length // config.page_size),
        urgency=_take(state.urgency, rows),
    )
    return signals, raw


def _decide(config: DecoderConfig, settings: Sampling, signals: Signals, control: ControlState) -> ControlState:
    """Run the laws on every row; greedy requests stay greedy under every law."""
    control = replace(control, total_cost=control.total_cost + signals.cost)
    return _cold(settings, jax.vmap(config.law)(signals, control))


def _cold(settings: Sampling, control: ControlState) -> ControlState:
    """The control state with temperature 0 where the request is greedy."""
    return replace(control, temperature=jnp.where(settings.temperature == 0, 0.0, control.temperature))

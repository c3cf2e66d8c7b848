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
from et_jax import cost, entropy, pages, sampling
from et_jax.attend import Memory, Receipts, Row, decode_attend, prefill_attend, start_receipts
from et_jax.control import guards
from et_jax.control.base import ControlState, Signals
from et_jax.drawing import draw
from et_jax.models.transformer import Params, forward
from et_jax.sampling import Sampling, TokenCounts
from et_jax.state import DecoderConfig, DecodeState, Request, StepOutput, blank_signals, empty, fresh_control
from et_jax.types import replace


def prefill(
    config: DecoderConfig,
    params: Params,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, " t"],
    count: Int[Array, ""],
) -> tuple[DecodeState, Bool[Array, ""]]:
    """Write the next `count` prompt tokens of an inactive slot into the cache; False where pages ran out.

    `tokens` is one chunk, padded. The prompt's last token is left for `insert`, so that every token is
    sampled in `step`. A refused chunk changes nothing.
    """
    start = state.length[slot]
    blocks = -(-(start + count) // config.page_size)
    here = jnp.arange(config.num_slots) == slot
    most = config.chunk // config.page_size + 1
    table, granted = pages.reserve(state.table, jnp.where(here, blocks, 0), most)
    granted = granted[slot]
    written = jnp.where(granted, count, 0)
    attend = prefill_attend(config.reading, table.pages[slot][None], start[None], written[None])
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    logits, cache = forward(params, config.model, tokens[None], positions[None], attend, state.cache)
    last = state.logits
    if last is not None:
        before = jnp.concatenate([last[slot][None], logits[0, :-1]])
        surprisal = jnp.where(positions == 0, 0.0, _surprisal(before, tokens))
        cache = kv.write_surprisal(cache, surprisal[None], table.pages[slot][None], start[None], written[None])
        last = last.at[slot].set(jnp.where(written > 0, logits[0, count - 1], last[slot]))
    return replace(state, table=table, cache=cache, logits=last, length=state.length.at[slot].add(written)), granted


def insert(config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], request: Request) -> DecodeState:
    """Start a sequence in `slot`, whose prompt but for the last token has been prefilled."""

    def put(tree: Any, row: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[slot].set(y), tree, row)

    counts = state.counts
    if counts is not None:
        if request.in_prompt is None:
            raise ValueError("request.in_prompt: got None, wanted the prompt's tokens, because penalties are kept")
        none_yet = jnp.zeros(config.model.vocab_size, jnp.int32)
        counts = put(counts, TokenCounts(in_prompt=request.in_prompt, generated=none_yet))
    return replace(
        state,
        token=state.token.at[slot].set(request.token),
        generated=state.generated.at[slot].set(0),
        limit=state.limit.at[slot].set(request.limit),
        active=state.active.at[slot].set(request.limit > 0),
        arrival=state.arrival.at[slot].set(request.arrival),
        urgency=state.urgency.at[slot].set(request.urgency),
        stop_ids=state.stop_ids.at[slot].set(request.stop_ids),
        sampling=put(state.sampling, sampling.fold_key(request.sampling, request.index)),
        counts=counts,
        signals=put(state.signals, blank_signals(())),
        control=put(state.control, fresh_control(config, request.sampling.temperature)),
    )


def release(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Stop a slot's sequence and give back its pages."""
    return replace(
        state,
        active=state.active.at[slot].set(False),
        length=state.length.at[slot].set(0),
        table=pages.release(state.table, slot),
    )


def fork(
    config: DecoderConfig, state: DecodeState, slot: Int[Array, ""], into: Int[Array, ""]
) -> tuple[DecodeState, Bool[Array, ""]]:
    """Continue `slot`'s sequence a second time in the empty slot `into`; False where no page was free.

    Full pages are shared by reference count; the partial page is copied with its summary. The key is
    folded with `into`, so that the two futures differ; everything else, control included, is equal. A
    refused fork changes nothing.
    """
    length = state.length[slot]
    full, held = length // config.page_size, -(-length // config.page_size)
    shared = pages.share(state.table, slot, into, full)
    wanted = jnp.where(jnp.arange(config.num_slots) == into, held, 0)
    table, granted = pages.reserve(shared, wanted, 1)
    granted = granted[into]
    page, fresh = state.table.pages[slot, full], table.pages[into, full]
    copied = kv.copy_page(state.cache, jnp.where(granted, page, 0), jnp.where(granted, fresh, 0))
    rows = jnp.arange(config.num_slots)
    source = jnp.where((rows == into) & granted, slot, rows)

    def row(x: Array) -> Array:
        return x[source]

    rest = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name not in ("table", "cache")}
    forked = replace(state, **jax.tree.map(row, rest), cache=copied)
    split = sampling.fold_key(jax.tree.map(lambda x: x[slot], state.sampling), into).key
    keys = forked.sampling.key.at[into].set(jnp.where(granted, split, forked.sampling.key[into]))
    return replace(
        forked,
        sampling=replace(forked.sampling, key=keys),
        table=jax.tree.map(lambda new, old: jnp.where(granted, new, old), table, state.table),
    ), granted


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
        counts = _take(state.counts, rows)
        signals, raw = _measure(config, params, state, rows, run, logits, memory.receipts)
        failed = run & ~jnp.isfinite(raw.s0)
        produced = run & ~failed
        normaliser = entropy.log_normaliser(raw)
        rule = config.controller.temperature_rule
        drawn = draw(rule, logits, settings, counts, signals, control, length + 1, raw)
        logit = jnp.take_along_axis(logits, drawn.token[:, None], axis=1)[:, 0]
        signals = replace(drawn.signals, surprisal=normaliser - logit)
        masks = jnp.stack(memory.receipts.block_masks, axis=1)
        control = _decide(config, settings, signals, replace(control, block_mask=masks))

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
        counts=put(state.counts, None if counts is None else sampling.count(counts, drawn.token, produced)),
        signals=put(state.signals, signals),
        logits=put(state.logits, None if state.logits is None else logits),
        control=put(replace(state.control, wait=waited), replace(control, wait=jnp.zeros_like(control.wait))),
        table=table,
        cache=memory.cache,
    )
    top = jax.lax.top_k(logits, config.num_logprobs) if config.num_logprobs else None
    output = StepOutput(
        token=after.token,
        produced=_scatter(every, rows, produced),
        finished=_scatter(every, rows, finished),
        failed=_scatter(every, rows, failed),
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
    config: DecoderConfig, params: Params, state: DecodeState, num_steps: Int[Array, ""]
) -> tuple[DecodeState, StepOutput, Int[Array, ""]]:
    """Run up to `num_steps` steps (at most `max_steps`) on the device, stopping early when no slot is active.

    Returns the outputs stacked over `max_steps`, of which the returned number were run.
    """
    _, shapes = jax.eval_shape(partial(step, config), params, state)
    outputs = jax.tree.map(lambda x: jnp.zeros((config.max_steps, *x.shape), x.dtype), shapes)
    num_steps = jnp.minimum(num_steps, config.max_steps)

    def going(carry: tuple) -> Bool[Array, ""]:
        i, state, _ = carry
        return (i < num_steps) & jnp.any(state.active)

    def advance(carry: tuple) -> tuple:
        i, state, outputs = carry
        state, output = step(config, params, state)
        return i + 1, state, jax.tree.map(lambda all_, x: all_.at[i].set(x), outputs, output)

    ran, state, outputs = jax.lax.while_loop(going, advance, (jnp.int32(0), state, outputs))
    return state, outputs, ran


def snapshot(state: DecodeState) -> DecodeState:
    """Return a copy that outlives a donating step."""
    return jax.tree.map(jnp.copy, state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """The functions of this module with their configuration bound, jitted, the state they are given donated."""

    config: DecoderConfig
    empty: Callable[[], DecodeState]
    prefill: Callable[[Params, DecodeState, Any, Any, Any], tuple[DecodeState, Bool[Array, ""]]]
    insert: Callable[[DecodeState, Any, Request], DecodeState]
    step: Callable[[Params, DecodeState], tuple[DecodeState, StepOutput]]
    decode: Callable[[Params, DecodeState, Any], tuple[DecodeState, StepOutput, Int[Array, ""]]]
    release: Callable[[DecodeState, Any], DecodeState]
    fork: Callable[[DecodeState, Any, Any], tuple[DecodeState, Bool[Array, ""]]]


def decoder(config: DecoderConfig) -> Decoder:
    """Return the decoder of a configuration."""
    return Decoder(
        config=config,
        empty=jax.jit(partial(empty, config)),
        prefill=jax.jit(partial(prefill, config), donate_argnums=1),
        insert=jax.jit(partial(insert, config), donate_argnums=0),
        step=jax.jit(partial(step, config), donate_argnums=1),
        decode=jax.jit(partial(decode, config), donate_argnums=1),
        release=jax.jit(release, donate_argnums=0),
        fork=jax.jit(partial(fork, config), donate_argnums=0),
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
    """The `batch` runnable slots of highest priority, or None when every slot advances."""
    if config.batch == config.num_slots:
        return None
    priority = jnp.where(state.active, state.control.priority, -jnp.inf)
    return jax.lax.top_k(priority, config.batch)[1]


def _surprisal(logits: Float[Array, "r v"], token: Int[Array, " r"]) -> Float[Array, " r"]:
    """-log p of each row's token, in nats, under the logits that came before it."""
    logit = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    return entropy.log_normaliser(entropy.moments(logits)) - logit


def _traffic(params: Params, cache: kv.KVCache) -> cost.Traffic:
    layer = cache.layers[0]
    num_blocks = layer.pages.shape[0] * layer.pages.shape[1]
    return cost.Traffic(
        weights=cost.num_bytes(params),
        block=cost.num_bytes(layer.pages) // num_blocks,
        summary=cost.num_bytes((layer.summary, layer.key_codes)) // num_blocks,
    )


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
        cost=cost.sequence_bytes(
            _traffic(params, state.cache), config.batch, receipts.blocks_read, receipts.summaries_read
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
    decided = jax.vmap(config.law)(signals, control)
    return replace(decided, temperature=jnp.where(settings.temperature == 0, 0.0, decided.temperature))

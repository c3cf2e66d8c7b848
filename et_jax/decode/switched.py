"""A step of two models, of which one speaks in each sequence: Entropy Adaptive Decoding (Simonds 2025).

A step runs one of them, for sequences in which it speaks. First it reads what it has not seen of their texts. Where the
switch gives the word to the other before a token is sampled, the sequence waits for a step of the other.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.controller import Controller
from et_jax.control.switch import MODEL, SMALL, Switch, SwitchState
from et_jax.decode import cost
from et_jax.decode.attention import ReadStats, no_reads
from et_jax.decode.cache import KVCache
from et_jax.decode.once import where_asked
from et_jax.decode.rows import Rows
from et_jax.decode.sample import sample
from et_jax.decode.small import Weights, catch_up, of_model, of_small, read_small
from et_jax.decode.state import DecoderConfig, DecodeState, Spent, StepOutput
from et_jax.decode.step import choose, extend, reserve, traffic
from et_jax.decode.verify import commit, control, measure, report
from et_jax.models.model import ModelWeights
from et_jax.types import replace


def step(config: DecoderConfig, params: Weights, state: DecodeState) -> tuple[DecodeState, StepOutput]:
    """Advance by one token the sequences of the model whose turn it is.

    choose -> reserve -> catch up -> extend -> measure, sample, control -> switch -> commit.
    """
    assert state.switch is not None and state.spent is not None
    speaker = turn(state)
    switch = state.switch
    state, chosen = choose(config, state, switch.speaker == speaker)
    table, rows = reserve(config, state, chosen)
    state = replace(state, table=table)
    state, logits, stats, spent = read(config, params, state, rows, speaker)
    signals, raw = measure(
        config, traffic(of_model(params), state.cache, config.by_mass_of), state, rows, logits, stats
    )
    signals = replace(signals, cost=_nominal(config, params, state, signals.cost, rows, speaker))
    before, certainty = rows.take(switch), entropy.entropy(raw)
    laws = rows.take(state.laws)
    handed = jax.vmap(_before)(laws, before, certainty)
    deferred = rows.run & (handed.speaker != before.speaker)
    sampled = sample(state, rows, logits, signals, raw)
    verdict = control(state, rows, sampled, raw, stats)
    verdict = replace(verdict, produced=verdict.produced & ~deferred, finished=verdict.finished & ~deferred)
    after = commit(state, rows, logits, sampled, verdict, True)
    output = report(config, state, after, rows, logits, raw, sampled, verdict, stats, True)
    spoken = jax.vmap(_after)(laws, before, certainty)
    return replace(
        after,
        switch=rows.put_where(deferred, rows.put_where(verdict.produced, switch, spoken), handed),
        spent=jax.tree.map(lambda x: jnp.where(_leading(output.produced, x), 0, x), spent),
    ), replace(
        output,
        refused=rows.spread(config.num_slots, chosen.run & ~rows.run),
        by_small=output.produced & (speaker == SMALL),
        spent=spent,
    )


def turn(state: DecodeState) -> Int[Array, ""]:
    """Return whose step it is: that of the sequence which has waited longest, so that none waits for ever."""
    assert state.switch is not None
    waited = jnp.where(state.active, state.control.wait, -1)
    return state.switch.speaker[jnp.argmax(waited)]


def read(
    config: DecoderConfig, params: Weights, state: DecodeState, rows: Rows, speaker: Int[Array, ""]
) -> tuple[DecodeState, Float[Array, "r v"], ReadStats, Spent]:
    """Have the speaker catch up with the rows' texts and read their newest tokens.

    Returns the logits, what was read, and what every slot has spent since its last token.
    """
    assert state.text is not None and state.held is not None and state.model_held is not None
    assert state.small is not None and state.spent is not None
    pages, text = rows.take(state.table.pages), rows.take(state.text)
    control, none = rows.take(state.control), no_reads(rows.token.shape[0])
    layers = range(config.model.num_layers)
    whole = replace(
        none,
        blocks_read=jnp.where(rows.run, _small_blocks(config, rows), 0),
        block_masks=tuple(control.block_mask[:, i] for i in layers),
        block_masses=tuple(None if control.block_mass is None else control.block_mass[:, i] for i in layers),
    )

    def caught_up(policy, weights: ModelWeights, cache: KVCache, held: Int[Array, " r"]) -> tuple:
        wanted = jnp.where(rows.run, rows.position, held)
        return catch_up(policy, weights, cache, pages, text, held, wanted, config.chunk, config.audit)

    def by_model(carry: tuple, rows: Rows) -> tuple:
        cache, small = carry[:2]
        cache, _, chunks, agreed = caught_up(config.read_policy, of_model(params), cache, rows.take(state.model_held))
        some = replace(state, cache=cache)
        logits, memory = extend(config, of_model(params), some, rows, rows.position + 1)
        return memory.cache, small, logits, memory.stats, chunks, agreed

    def by_small(carry: tuple, rows: Rows) -> tuple:
        cache, small = carry[:2]
        policy, weights = config.small_policy, of_small(params)
        small, _, chunks, agreed = caught_up(policy, weights, small, rows.take(state.held))
        logits, small = read_small(policy, weights, small, pages, rows, rows.position + 1)
        return cache, small, logits, whole, chunks, agreed

    shapes = jax.eval_shape(lambda: by_model((state.cache, state.small), rows))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[2:])
    carry = (state.cache, state.small, *blank)
    carry = where_asked(speaker == MODEL, by_model, carry, rows)
    carry = where_asked(speaker == SMALL, by_small, carry, rows)
    cache, small, logits, stats, chunks, agreed = carry
    both = rows.take(jnp.stack([state.model_held, state.held], axis=1))
    read_now = jnp.where(rows.run, rows.position + 1 - both[jnp.arange(both.shape[0]), speaker], 0)
    num_rows = jnp.maximum(jnp.sum(rows.run), 1).astype(jnp.float32)
    share = jnp.where(rows.run, (chunks + 1).astype(jnp.float32) / num_rows, 0.0)
    mine = jnp.arange(2) == speaker
    spent = Spent(
        tokens=state.spent.tokens + rows.spread(config.num_slots, jnp.where(mine, read_now[:, None], 0)),
        passes=state.spent.passes + rows.spread(config.num_slots, jnp.where(mine, share[:, None], 0.0)),
        audited=state.spent.audited,
        agreed=state.spent.agreed,
    )
    if agreed is not None:
        # of the tokens caught up with, those that lead to a word of the text rather than of its prompt
        place, first = jnp.arange(text.shape[1]), rows.position - rows.take(state.generated)
        lag = both[jnp.arange(both.shape[0]), speaker]
        counted = (place >= jnp.maximum(lag, first)[:, None]) & (place < rows.position[:, None]) & rows.run[:, None]
        told = {"audited": counted, "agreed": counted & agreed}
        sums = {name: jnp.sum(each, axis=1, dtype=jnp.int32) for name, each in told.items()}
        spread = rows.spread(config.num_slots, sums)
        spent = replace(spent, **{name: getattr(spent, name) + each for name, each in spread.items()})
    held = jnp.where(rows.run[:, None] & mine, (rows.position + 1)[:, None], both)
    return (
        replace(
            state,
            cache=cache,
            small=small,
            model_held=rows.put(state.model_held, held[:, MODEL]),
            held=rows.put(state.held, held[:, SMALL]),
        ),
        logits,
        stats,
        spent,
    )


def _nominal(
    config: DecoderConfig,
    params: Weights,
    state: DecodeState,
    of_the_model: Float[Array, " r"],
    rows: Rows,
    speaker: Int[Array, ""],
) -> Float[Array, " r"]:
    """What a token costs in the eyes of the laws: that of the model as ever, of the small one by its own sizes."""
    assert state.small is not None
    moved, blocks = traffic(of_small(params), state.small), _small_blocks(config, rows)
    small = cost.nominal_bytes(moved, config.batch, blocks, jnp.zeros_like(blocks))
    return jnp.where(speaker == SMALL, small, of_the_model)


def _small_blocks(config: DecoderConfig, rows: Rows) -> Int[Array, " r"]:
    """The blocks that the small model reads, over layers and KV heads: all there are."""
    assert config.small is not None
    heads = config.small.num_layers * config.small.num_kv_heads
    return (rows.position // config.page_size + 1) * heads


def _switch(laws: Controller) -> Switch:
    assert laws.switch is not None
    return laws.switch


def _before(laws: Controller, state: SwitchState, certainty: Float[Array, ""]) -> SwitchState:
    return _switch(laws).before(state, certainty)


def _after(laws: Controller, state: SwitchState, certainty: Float[Array, ""]) -> SwitchState:
    return _switch(laws).after(state, certainty)


def _leading(produced: Bool[Array, " b"], like: Array) -> Bool[Array, "b *x"]:
    return produced.reshape(-1, *[1] * (like.ndim - 1))

"""Two models that take turns, one of them active in each sequence: Entropy Adaptive Decoding (Simonds 2025).

A step runs one of them. It first catches up with its sequences. If the switch activates the
other one before a token is sampled, the sequence waits for a step of that model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.switch import MODEL, SMALL, SwitchState
from et_jax.decode.attention.readers import FullAttention
from et_jax.decode.attention.reads import ReadStats, no_reads
from et_jax.decode.chunk import of_rows
from et_jax.decode.config import DecoderConfig
from et_jax.decode.extend import catch_up, extend
from et_jax.decode.mixing import no_experts
from et_jax.decode.once import run_if
from et_jax.decode.output import Audit
from et_jax.decode.plant import PlantState, Weights
from et_jax.decode.rows import Rows
from et_jax.decode.state import DecodeState
from et_jax.decode.work import Work, of_tokens
from et_jax.types import replace

Extend = Callable[..., tuple[DecodeState, Float[Array, "r v"], ReadStats]]


def chosen(state: DecodeState) -> tuple[Int[Array, ""] | int, Bool[Array, " b"] | bool]:
    """Return the model of this step, and the mask of sequences in which it is active.

    It is the active model of the sequence that has waited longest, which prevents starvation; or the only model.
    """
    if state.switch is None:
        return MODEL, True
    waited = jnp.where(state.runnable, state.control.wait, -1)
    active = state.switch.speaker[jnp.argmax(waited)]
    return active, state.switch.speaker == active


def extend_active(
    config: DecoderConfig,
    weights: Weights,
    state: DecodeState,
    rows: Rows,
    active: Int[Array, ""] | int,
    extend_rows: Extend,
) -> tuple[DecodeState, Float[Array, "r v"], ReadStats, tuple[Work, ...], Audit | None]:
    """Let the active model catch up with the rows' sequences and process their newest tokens, by `extend_rows`.

    A single model has nothing to catch up with.
    Returns the work of each model for the rows, and the active one's audit of the other's tokens, if requested.
    """
    if state.switch is None:
        state, logits, stats = extend_rows(config, weights, state, rows, rows.place + 1)
        done = of_tokens(config.plants[MODEL], rows, stats.blocks_read, stats.summaries_read, stats.experts)
        return state, logits, stats, (done,), None
    table, text, before = rows.take(state.table.pages), rows.take(state.text), rows.take(_num_cached(state))

    def caught_up(index: int, plants: tuple[PlantState, ...], rows: Rows) -> tuple:
        wanted = jnp.where(rows.run, rows.position, before[:, index])
        plant, params, own = config.plants[index], weights[index], plants[index]
        return catch_up(plant, params, own, rows.slot, table, text, wanted, config.chunk, config.audit)

    def by_model(carry: tuple, rows: Rows) -> tuple:
        own, done, agreed = caught_up(MODEL, carry[0], rows)
        some = replace(state, plants=carry[0]).with_plant(MODEL, own)
        some, logits, stats = extend_rows(config, weights, some, rows, rows.position + 1)
        more = of_tokens(config.plants[MODEL], rows, stats.blocks_read, stats.summaries_read, stats.experts)
        return some.plants, logits, stats, done.plus(more), agreed

    def by_small(carry: tuple, rows: Rows) -> tuple:
        own, done, agreed = caught_up(SMALL, carry[0], rows)
        chunk = of_rows(rows, table, rows.position + 1)
        logits, own, _, took = extend(config.plants[SMALL], weights[SMALL], own, chunk, FullAttention())
        some = replace(state, plants=carry[0]).with_plant(SMALL, own)
        stats = _full_reads(config, state, rows)
        more = of_tokens(config.plants[SMALL], rows, stats.blocks_read, stats.summaries_read, took)
        return some.plants, logits[:, 0], stats, done.plus(more), agreed

    shapes = jax.eval_shape(lambda: by_model((state.plants,), rows))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[1:])
    carry = (state.plants, *blank)
    carry = run_if(active == MODEL, by_model, carry, rows)
    carry = run_if(active == SMALL, by_small, carry, rows)
    plants, logits, stats, done, agreed = carry
    work = tuple(done.where(active == index) for index in range(len(plants)))
    audit = _audit(config, state, rows, before[:, active], agreed)
    return replace(state, plants=plants), logits, stats, work, audit


def _num_cached(state: DecodeState) -> Int[Array, "b m"]:
    """Return how many tokens of every slot each model has processed."""
    return jnp.stack([plant.num_cached for plant in state.plants], axis=1)


def turn(
    state: DecodeState, rows: Rows, raw: entropy.Moments, produced: Bool[Array, " r"]
) -> tuple[SwitchState | None, Bool[Array, " r"], Bool[Array, " r"] | None]:
    """Return the new switch states, which rows get a token, and which of them one of the small model.

    A row whose switch activates the other model before its token is sampled gets no token.
    """
    switch, laws = state.switch, state.laws.switch
    if switch is None or laws is None:
        return switch, produced, None
    before, own, certainty = rows.take(switch), rows.take(laws), entropy.entropy(raw)
    turned = jax.vmap(lambda law, one, certain: law.before(one, certain))(own, before, certainty)
    deferred = rows.run & (turned.speaker != before.speaker)
    produced = produced & ~deferred
    went_on = jax.vmap(lambda law, one, certain: law.after(one, certain))(own, before, certainty)
    after = rows.put_where(deferred, rows.put_where(produced, switch, went_on), turned)
    return after, produced, produced & (before.speaker == SMALL)


def _full_reads(config: DecoderConfig, state: DecodeState, rows: Rows) -> ReadStats:
    """Return the small model's reads, full attention. The model's own blocks are unchanged."""
    plant, control = config.plants[SMALL], rows.take(state.control)
    blocks = (rows.position // config.page_size + 1) * plant.all_kv_heads
    return replace(
        no_reads(rows.token.shape[0]),
        blocks_read=jnp.where(rows.run, blocks, 0),
        experts=no_experts(config.plants[MODEL], rows.token.shape[0]),
        block_masks=control.block_mask,
        block_masses=control.block_mass,
    )


def _audit(
    config: DecoderConfig, state: DecodeState, rows: Rows, before: Int[Array, " r"], agreed: Bool[Array, "r n"]
) -> Audit:
    """Return a model's audit of the tokens since `before` that it caught up with, if requested."""
    # of the tokens caught up with, those that precede a produced token, not one of the prompt
    place, first = jnp.arange(agreed.shape[1]), rows.position - rows.take(state.generated)
    counted = (place >= jnp.maximum(before, first)[:, None]) & (place < rows.position[:, None]) & rows.run[:, None]
    counted &= config.audit
    audited, same = (jnp.sum(each, axis=1, dtype=jnp.int32) for each in (counted, counted & agreed))
    return Audit(audited=audited, agreed=same)

"""Models that draft: a second one of the decoder, or the model itself with sparse attention.

Their tokens are always verified. If the model drafts for itself, verification
recomputes the keys and values of every drafted token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control import entropy
from et_jax.control.switch import MODEL, SMALL
from et_jax.decode.attention.pruned import Heavy, heavy
from et_jax.decode.attention.readers import FullAttention
from et_jax.decode.chunk import of_rows
from et_jax.decode.config import DecoderConfig
from et_jax.decode.drafting.drafts import Drafting, Drafts, Pruned
from et_jax.decode.extend import catch_up, extend
from et_jax.decode.once import run_if
from et_jax.decode.plant import PlantState, Weights
from et_jax.decode.rows import Rows
from et_jax.decode.sampling.sample import guess
from et_jax.decode.state import DecodeState
from et_jax.decode.work import Work, no_work, of_chunks, of_tokens
from et_jax.types import replace


@jax.named_scope("draft")
def draft(
    config: DecoderConfig, how: Drafting, weights: Weights, state: DecodeState, rows: Rows, count: Int[Array, " r"]
) -> tuple[DecodeState, Drafts]:
    """Draft with the small model what follows the newest token of each row: `count` tokens, or fewer if it stops.

    It first catches up with the sequences. Each token is sampled as the model will sample it, with the same
    noise, temperature, truncation and penalties, which maximises the acceptance rate of similar distributions.
    """
    plant, params, own = config.plants[SMALL], weights[SMALL], state.plants[SMALL]
    table, text = rows.take(state.table.pages), rows.take(state.text)
    before, position = rows.take(own.num_cached), rows.position
    behind = (count > 0) & (before < position - 1)
    wanted = jnp.where(behind, position, before)
    own, caught_up, _ = catch_up(plant, params, own, rows.slot, table, text, wanted, config.chunk)
    # After a fully accepted draft the key of its last token is missing: it is written before the newest token.
    one_behind = (count > 0) & (rows.take(own.num_cached) < position)
    last = jnp.take_along_axis(text, jnp.maximum(position - 1, 0)[:, None], axis=1)[:, 0]
    num_rows = position.shape[0]
    slot = jnp.arange(num_rows, dtype=jnp.int32) if rows.slot is None else rows.slot
    both = Rows(
        slot=jnp.tile(slot, 2),
        token=jnp.concatenate([rows.token, last]),
        position=jnp.concatenate([position, jnp.maximum(position - 1, 0)]),
        run=jnp.concatenate([count > 0, one_behind]),
    )

    def read(own: PlantState, rows: Rows, table: Int[Array, "r n"], end: Int[Array, " r"]) -> tuple:
        logits, own, _, took = extend(plant, params, own, of_rows(rows, table, end), FullAttention())
        return logits[:, 0], own, of_chunks(plant, rows.run.astype(jnp.int32), rows.position + 1, took)

    def going(carry: tuple) -> Bool[Array, ""]:
        i, _, _, count, _ = carry
        return i < jnp.max(count)

    def with_drawn(carry: tuple, own: PlantState, logits: Float[Array, "r v"], more: Work) -> tuple:
        i, _, tokens, count, done = carry
        token, stops = _drawn(state, rows, logits, position + i + 1)
        count = jnp.where(stops, jnp.minimum(count, i + 1), count)
        return i + 1, own, tokens.at[:, i].set(token), count, done.plus(more)

    def begin(carry: tuple, both: Rows) -> tuple:
        logits, own, more = read(carry[1], both, jnp.tile(table, (2, 1)), jnp.tile(position + 1, 2))
        each = jax.tree.map(lambda x: jnp.sum(x.reshape(2, num_rows), axis=0, dtype=x.dtype), more)
        return with_drawn(carry, own, logits[:num_rows], _shared(each, more, num_rows))

    def go_on(carry: tuple) -> tuple:
        i, own, tokens, count, _ = carry
        here = Rows(slot=rows.slot, token=tokens[:, i - 1], position=position + i, run=i < count)
        logits, own, more = read(own, here, table, position + i + 1)
        return with_drawn(carry, own, logits, more)

    nothing = jnp.int32(0), own, jnp.zeros((num_rows, how.most), jnp.int32), count, caught_up
    begun = run_if(jnp.any(count > 0), begin, nothing, both)
    _, own, tokens, drafted, done = jax.lax.while_loop(going, go_on, begun)
    return state.with_plant(SMALL, own), Drafts(token=tokens, count=drafted, work=done)


@jax.named_scope("draft")
def draft_pruned(
    config: DecoderConfig,
    how: Drafting,
    pruned: Pruned,
    weights: Weights,
    state: DecodeState,
    rows: Rows,
    count: Int[Array, " r"],
) -> tuple[DecodeState, Drafts]:
    """Draft with the model itself what follows the newest token of each row, reading few blocks; otherwise as `draft`.

    The blocks are those of `DecodeState.heavy_blocks`, listed once.
    """
    if state.heavy_blocks is None:
        raise ValueError("state: got one without heavy_blocks, wanted that of a decoder whose model drafts for itself")
    plant, params, own = config.plants[MODEL], weights[MODEL], state.plants[MODEL]
    table, position, num_rows = rows.take(state.table.pages), rows.position, len(rows.token)

    def listed(
        blocks: UInt32[Array, "r l k n32"], place: Int[Array, " r"], skipped: Int[Array, "r l k"] | None
    ) -> Heavy:
        return heavy(pruned, how.most, blocks, config.blocks_per_slot, place, config.page_size, skipped)

    known = rows.take(state.heavy_blocks), rows.place, rows.take(own.skipped)
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(listed, *known))
    reader = run_if(jnp.any(count > 0), lambda _, given: listed(*given), nothing, known)

    def going(carry: tuple) -> Bool[Array, ""]:
        i, _, _, count, _ = carry
        return i < jnp.max(count)

    def go_on(carry: tuple) -> tuple:
        i, own, tokens, count, done = carry
        newest = jnp.where(i == 0, rows.token, tokens[:, i - 1])
        here = replace(rows, token=newest, position=position + i, run=i < count)
        logits, own, blocks, took = extend(plant, params, own, of_rows(here, table, here.place + 1), reader)
        token, stops = _drawn(state, rows, logits[:, 0], position + i + 1)
        count = jnp.where(stops, jnp.minimum(count, i + 1), count)
        more = of_tokens(plant, here, blocks, jnp.zeros_like(blocks), took)
        return i + 1, own, tokens.at[:, i].set(token), count, done.plus(more)

    begun = jnp.int32(0), own, jnp.zeros((num_rows, how.most), jnp.int32), count, no_work(plant, num_rows)
    _, own, tokens, drafted, done = jax.lax.while_loop(going, go_on, begun)
    return state.with_plant(MODEL, own), Drafts(token=tokens, count=drafted, own=done)


def _shared(each: Work, more: Work, num_rows: int) -> Work:
    """Return the work of each row, with shared work counted once."""
    if each.experts is not None and more.experts is not None:
        each = replace(each, experts=replace(each.experts, touched=more.experts.touched[:num_rows]))
    return replace(each, passes=more.passes[:num_rows])


def _drawn(
    state: DecodeState, rows: Rows, logits: Float[Array, "r v"], position: Int[Array, " r"]
) -> tuple[Int[Array, " r"], Bool[Array, " r"]]:
    """Return the token of each row at its position, and whether a draft ends with it."""
    uncertain, law = entropy.entropy(entropy.moments(logits)), state.draft_laws[0]
    return guess(state, rows, logits, position), jax.vmap(lambda one: jnp.asarray(law.stops(one)))(uncertain)

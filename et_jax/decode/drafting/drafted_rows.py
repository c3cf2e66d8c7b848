"""The drafted tokens of a step: pages are reserved for them, they are proposed, and verified as rows of their own."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control import entropy
from et_jax.control.draft import MOST_DRAFTED
from et_jax.control.switch import MODEL
from et_jax.decode.attention.pruned import RecordedRows
from et_jax.decode.attention.reads import ReadStats
from et_jax.decode.cache import kv, pages
from et_jax.decode.config import DecoderConfig
from et_jax.decode.drafting import drafter
from et_jax.decode.drafting.drafts import Drafting, Drafts, Pruned, allowed, laid_out
from et_jax.decode.drafting.turns import Extend
from et_jax.decode.once import run_if
from et_jax.decode.plant import PlantState, Weights
from et_jax.decode.rows import Rows
from et_jax.decode.sampling.steering import forced_ahead
from et_jax.decode.state import DecodeState
from et_jax.decode.work import Work
from et_jax.types import replace

# The most cells of the grid (slot, token) per row; beyond it, each row attends separately.
_MOST_CELLS = 3


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
    count = allowed(rows.run, jnp.minimum(wanted, _room_ahead(config, state, rows)), left, how.most)
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
    reading: Extend,
) -> tuple[DecodeState, Float[Array, "w v"], ReadStats, Rows, Int[Array, "r t1"]]:
    """Run the model on the rows and their drafts, by `reading`, in the smallest compiled width that fits them.

    Returns the state, logits and stats of every row, all rows, and the row index of each token of a slot.
    """
    widths = how.widths(config.batch)
    all_rows, end, at = laid_out(rows, drafts, widths[-1])
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

    _, shapes = jax.eval_shape(lambda: run(state.plants[MODEL], all_rows, recorded_rows))
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = state.plants[MODEL], blank

    def fill(carry: tuple, given: tuple) -> tuple:
        own, wide = carry
        own, found = run(own, *given)
        return own, jax.tree.map(lambda old, new: old.at[: len(new)].set(new), wide, found)

    for width, narrower in zip(widths, (0, *widths), strict=False):
        some = jax.tree.map(lambda x, width=width: x[:width], all_rows)
        carry = run_if((needed <= width) & (needed > narrower), fill, carry, (some, recorded_rows))
    own, (logits, stats) = carry
    return state.with_plant(MODEL, own), logits, stats, all_rows, at


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


def worked(own: Work, drafts: Drafts) -> tuple[Work, ...]:
    """Return the work of every model and position: that of verification, and with the first what drafts took."""
    if drafts.own is not None:
        own = jax.tree.map(lambda x, more: x.at[0].add(more), own, drafts.own)
    if drafts.work is None:
        return (own,)
    return own, jax.tree.map(lambda x, more: jnp.zeros_like(x).at[0].set(more), own, drafts.work)

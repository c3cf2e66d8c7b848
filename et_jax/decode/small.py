"""A small model beside the model, whose pages have the same numbers: how it keeps up with a text, and drafts.

It reads everything it has seen, and nothing that it writes is ever part of a text: drafts are verified.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from et_jax.control import entropy
from et_jax.control.select import Dense
from et_jax.decode import cost
from et_jax.decode.attention import LayerCarry, ReadRow, decode_attend, no_reads, prefill_attend
from et_jax.decode.cache import KVCache
from et_jax.decode.draft import Drafting, Drafts
from et_jax.decode.once import where_asked
from et_jax.decode.reading import ReadPolicy
from et_jax.decode.rows import Rows
from et_jax.decode.sample import guess
from et_jax.decode.state import DecoderConfig, DecodeState
from et_jax.models.config import ModelShape
from et_jax.models.model import ModelWeights, forward, num_multiplied
from et_jax.types import pytree, replace


@pytree
class Pair:
    """The weights of a decoder of two models: of the one whose text it is, and of the small one."""

    model: ModelWeights
    small: ModelWeights


Weights = ModelWeights | Pair
"""What a decoder runs on: a `Pair` where its configuration has a small model."""


def of_model(weights: Weights) -> ModelWeights:
    """Return the weights of the model whose text it is."""
    return weights.model if isinstance(weights, Pair) else weights


def of_small(weights: Weights) -> ModelWeights:
    """Return the weights of the small model. Raises TypeError where there is none."""
    if not isinstance(weights, Pair):
        raise TypeError("params: got the weights of one model, wanted a Pair, for the configuration has a small model")
    return weights.small


def costs(model: ModelShape, params: ModelWeights, cache_dtype: DTypeLike) -> cost.Model:
    """Return what it takes to run a model."""
    return cost.Model(
        weights=cost.num_bytes(params),
        num_multiplied=num_multiplied(model),
        heads=model.num_layers * model.num_kv_heads,
        token=2 * model.head_dim * jnp.dtype(cache_dtype).itemsize,
        group_size=model.group_size,
        head_dim=model.head_dim,
    )


@jax.named_scope("draft")
def draft(
    config: DecoderConfig, how: Drafting, params: ModelWeights, state: DecodeState, rows: Rows, count: Int[Array, " r"]
) -> tuple[DecodeState, Drafts]:
    """Have the small model write what follows the newest token of each row: `count` tokens, or fewer where it stops.

    First it reads what it has not seen of the texts. Each token is drawn as the model will draw it, with the same
    noise, temperature, truncation and penalties, so that the two agree as often as their distributions let them.
    """
    assert state.small is not None and state.held is not None and state.text is not None
    policy, pages, text = config.small_policy, rows.take(state.table.pages), rows.take(state.text)
    held, position = rows.take(state.held), rows.position
    behind = (count > 0) & (held < position - 1)
    cache, seen, chunks, _ = catch_up(
        policy, params, state.small, pages, text, held, jnp.where(behind, position, held), config.chunk
    )
    # The key of a draft that held as a whole is not written yet: it goes before the newest token.
    one_behind = (count > 0) & (seen < position)
    before = jnp.take_along_axis(text, jnp.maximum(position - 1, 0)[:, None], axis=1)[:, 0]
    both = Rows(
        slot=None,
        token=jnp.concatenate([rows.token, before]),
        position=jnp.concatenate([position, jnp.maximum(position - 1, 0)]),
        run=jnp.concatenate([count > 0, one_behind]),
    )
    num_rows = position.shape[0]

    def going(carry: tuple) -> Bool[Array, ""]:
        i, _, _, count = carry
        return i < jnp.max(count)

    def with_drawn(carry: tuple, cache: KVCache, logits: Float[Array, "r v"]) -> tuple:
        i, _, tokens, count = carry
        token, stops = _drawn(how, state, rows, logits, position + i + 1)
        return i + 1, cache, tokens.at[:, i].set(token), jnp.where(stops, jnp.minimum(count, i + 1), count)

    def begin(carry: tuple, both: Rows) -> tuple:
        logits, cache = read_small(policy, params, carry[1], jnp.tile(pages, (2, 1)), both, jnp.tile(position + 1, 2))
        return with_drawn(carry, cache, logits[:num_rows])

    def go_on(carry: tuple) -> tuple:
        i, cache, tokens, count = carry
        here = Rows(slot=None, token=tokens[:, i - 1], position=position + i, run=i < count)
        logits, cache = read_small(policy, params, cache, pages, here, position + i + 1)
        return with_drawn(carry, cache, logits)

    nothing = jnp.int32(0), cache, jnp.zeros((num_rows, how.most), jnp.int32), count
    begun = where_asked(jnp.any(count > 0), begin, nothing, both)
    passes, cache, tokens, drafted = jax.lax.while_loop(going, go_on, begun)
    read = jnp.where(drafted > 0, position + drafted, seen)
    return replace(state, small=cache, held=rows.put(state.held, read)), Drafts(
        token=tokens,
        count=drafted,
        tokens_read=jnp.where(drafted > 0, read - held, 0),
        passes=chunks + passes,
    )


def catch_up(
    policy: ReadPolicy,
    params: ModelWeights,
    cache: KVCache,
    pages: Int[Array, "r n"],
    text: Int[Array, "r m"],
    held: Int[Array, " r"],
    wanted: Int[Array, " r"],
    chunk: int,
    audited: bool = False,
) -> tuple[KVCache, Int[Array, " r"], Int[Array, ""], Bool[Array, "r m"] | None]:
    """Read the tokens of each text from `held` to `wanted`, in chunks that end where those of its prompt would.

    Returns the cache, what is held now, how many chunks the longest took and, if `audited`, at which of the tokens read
    the token after it was the likeliest to this model.
    """
    agreed = jnp.zeros(text.shape, bool) if audited else None

    def behind(carry: tuple) -> Bool[Array, ""]:
        return jnp.any(carry[1] < wanted)

    def read(carry: tuple) -> tuple:
        cache, held, chunks, agreed = carry
        end = jnp.maximum(jnp.minimum(wanted, (held // chunk + 1) * chunk), held)
        position = held[:, None] + jnp.arange(chunk, dtype=jnp.int32)
        token = jnp.take_along_axis(text, jnp.minimum(position, text.shape[1] - 1), axis=1)
        start = jnp.where(end > held, held, 0)
        attend = prefill_attend(policy, pages, start, end - held, end)
        logits, cache = forward(params, policy.model, token, position, attend, cache)
        if agreed is not None:
            said = jnp.take_along_axis(text, jnp.minimum(position + 1, text.shape[1] - 1), axis=1)
            place = jnp.where(position < end[:, None], position, text.shape[1])
            same = jnp.argmax(logits, axis=-1) == said
            agreed = agreed.at[jnp.arange(text.shape[0])[:, None], place].set(same, mode="drop")
        return cache, end, chunks + 1, agreed

    return jax.lax.while_loop(behind, read, (cache, held, jnp.int32(0), agreed))


def read_small(
    policy: ReadPolicy,
    params: ModelWeights,
    cache: KVCache,
    pages: Int[Array, "r n"],
    rows: Rows,
    end: Int[Array, " r"],
) -> tuple[Float[Array, "r v"], KVCache]:
    """Write the rows' tokens, and return the logits of what comes next; a row's text ends at `end`."""
    r, model = rows.token.shape[0], policy.model
    row = ReadRow(
        table=pages,
        length=rows.position,
        end=end,
        run=rows.run,
        tolerance=jnp.zeros(r, jnp.float32),
        fresh=jnp.ones(r, bool),
        block_mask=jnp.zeros((r, model.num_layers, model.num_kv_heads, 1), jnp.uint32),
        kept_mass=jnp.ones(r, jnp.float32),
        selectors=(Dense(),) * model.num_layers,
    )
    memory = LayerCarry(cache=cache, stats=no_reads(r))
    attend = decode_attend(policy, row)
    logits, memory = forward(params, model, rows.token[:, None], rows.position[:, None], attend, memory)
    return logits[:, 0], memory.cache


def _drawn(
    how: Drafting, state: DecodeState, rows: Rows, logits: Float[Array, "r v"], position: Int[Array, " r"]
) -> tuple[Int[Array, " r"], Bool[Array, " r"]]:
    """The token of each row at its position, and whether a draft ends with it."""
    uncertain = entropy.entropy(entropy.moments(logits))
    return guess(state, rows, logits, position), jax.vmap(lambda one: jnp.asarray(how.length.stops(one)))(uncertain)

"""The work of a step for its sequences, by each of the decoder's models."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.decode.mixing import ExpertReads, no_experts
from et_jax.decode.plant import Plant
from et_jax.decode.rows import Rows
from et_jax.types import pytree, replace


@pytree
class Work:
    """The work of one model for a sequence; `cost.price` is its price.

    It processed `tokens`, and for them read `blocks` of the cache and scored `summaries`, counted over
    layers and KV heads. Their queries attended to at most `attended` keys, of every KV head of every layer. `passes`
    counts the reads of all its weights, which the rows of a step share: it is equal for each of them. Experts
    count separately: `experts` are those it used, None for a model without experts.
    """

    tokens: Int[Array, "*b"]
    passes: Int[Array, "*b"]
    blocks: Int[Array, "*b"]
    summaries: Int[Array, "*b"]
    attended: Float[Array, "*b"]
    experts: ExpertReads | None = None

    def plus(self, other: "Work") -> "Work":
        """Return the sum of both."""
        return jax.tree.map(jnp.add, self, other)

    def where(self, kept: Bool[Array, "*b"] | Bool[Array, ""]) -> "Work":
        """Return the work where it is `kept`, and none elsewhere."""
        return jax.tree.map(lambda x: jnp.where(kept, x, 0), self)


def no_work(plant: Plant, num_rows: int) -> Work:
    """Return empty work of rows."""
    none = jnp.zeros(num_rows, jnp.int32)
    return Work(
        tokens=none,
        passes=none,
        blocks=none,
        summaries=none,
        attended=none.astype(jnp.float32),
        experts=no_experts(plant, num_rows),
    )


def of_tokens(
    plant: Plant, rows: Rows, blocks: Int[Array, " r"], summaries: Int[Array, " r"], experts: ExpertReads | None
) -> Work:
    """Return the work of one pass over the rows' tokens, which read so many blocks and summaries, and used experts."""
    keys = jnp.minimum(blocks * plant.page_size, (rows.position + 1) * plant.all_kv_heads)
    run = rows.run.astype(jnp.int32)
    return Work(
        tokens=run,
        passes=jnp.ones_like(run),
        blocks=run * blocks,
        summaries=run * summaries,
        attended=(run * keys).astype(jnp.float32),
        experts=experts,
    )


def of_chunks(plant: Plant, count: Int[Array, " r"], end: Int[Array, " r"], experts: ExpertReads | None) -> Work:
    """Return the work of one pass over a chunk of `count` tokens a row, with full attention up to their `end`."""
    run = (count > 0).astype(jnp.int32)
    met = count.astype(jnp.float32) * end.astype(jnp.float32) * plant.all_kv_heads
    return Work(
        tokens=count,
        passes=jnp.ones_like(count),
        blocks=run * -(-end // plant.page_size) * plant.all_kv_heads,
        summaries=jnp.zeros_like(count),
        attended=met,
        experts=experts,
    )


def by_position(work: Work, at: Int[Array, "r t"], drafted: Int[Array, " r"], produced: Bool[Array, "t r"]) -> Work:
    """Return the work of every position, where `at` is the row of each token of a row, as in `laid_out`.

    The work for drafted tokens that were not `produced` counts for the first one.
    """
    ahead = jnp.arange(at.shape[1])
    real = (ahead <= drafted[:, None]).T
    each = jax.tree.map(lambda x: x[at].T, work)
    rest = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), each.where(real & ~produced))
    own = jax.tree.map(lambda x, more: x.at[0].add(more), each.where(real & produced), rest)
    first = partial(_at_first, at.shape)
    if work.experts is not None and own.experts is not None:
        own = replace(own, experts=replace(own.experts, touched=first(work.experts.touched)))
    return replace(own, passes=first(work.passes))


def _at_first(shape: tuple[int, ...], shared: Int[Array, " w"]) -> Int[Array, "t r"]:
    """Return what rows share at the first position of each, 0 at the others; `shape` is of rows and positions."""
    num_rows, length = shape
    return jnp.zeros((length, num_rows), shared.dtype).at[0].set(shared[:num_rows])

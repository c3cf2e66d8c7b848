"""Budgets compared on given text: what reading less of a prompt does to what the model predicts while it reads it.

Every segment of a text is read as prefill reads it, by the same code, and its logits are compared with those of dense
reading. The size of a budget is traced, so that one program serves every setting of an arm.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.budget import (
    Budget,
    ConstantBudget,
    EntropyBudget,
    EntropyNotes,
    MassBudget,
    begun,
    greatest,
)
from et_jax.control.segment import Segment, block_entropy
from et_jax.decode import cache as kv
from et_jax.decode.budgeted import Budgeted
from et_jax.decode.chunk import Chunk
from et_jax.decode.extend import extend
from et_jax.decode.plant import Plant, PlantState
from et_jax.models.model import arrangement
from et_jax.models.params import Params
from et_jax.models.stacks import depths_of
from et_jax.types import Number, pytree, replace, static, value


def best(segment: Segment, tokens: Float[Array, " k"]) -> Bool[Array, "k n"]:
    """Return the blocks of greatest score that hold so many tokens, of each head.

    What is left of a block is given to some heads by turns, so that any share of the blocks can be had.
    """
    heads = tokens.shape[0]
    turn = ((jnp.arange(heads) + segment.index + segment.layer) % heads).astype(jnp.float32)
    count = jnp.floor(tokens / segment.block_size + (turn + 0.5) / heads).astype(jnp.int32)
    return greatest(segment.score, count, segment.visible)


@value
class SizedConstant(ConstantBudget):
    """`ConstantBudget` of a traced size."""

    tokens: Number = 2048.0

    def __post_init__(self) -> None:
        Budget.__post_init__(self)

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        return best(segment, jnp.full(segment.score.shape[0], self.tokens, jnp.float32)), kept


@value
class SizedEntropy(EntropyBudget):
    """`EntropyBudget` of a traced size; `shuffled`, a head has the budget of another one of its layer, by chance."""

    tokens: Number = 2048.0
    shuffled: bool = static(default=False)

    def __post_init__(self) -> None:
        Budget.__post_init__(self)

    def choose(self, segment: Segment, kept: EntropyNotes) -> tuple[Bool[Array, "k n"], EntropyNotes]:
        """Return the blocks to read, and the budgets."""
        tokens, after = self.given(segment, kept)
        if self.shuffled:
            tokens = jax.random.permutation(_key(segment), tokens)
        return best(segment, tokens), after


@value
class SizedLevel(SizedConstant):
    """Tokens in proportion to a head's own entropy, not to how it changes; `shuffled` as in `SizedEntropy`."""

    shuffled: bool = static(default=False)

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        tokens = self.tokens * block_entropy(segment)
        if self.shuffled:
            tokens = jax.random.permutation(_key(segment), tokens)
        return best(segment, tokens), kept


def _key(segment: Segment) -> Array:
    return jax.random.fold_in(jax.random.key(segment.layer), segment.index)


@pytree
class Watched:
    """The notes of an `EntropyBudget`, and for how many segments a head has counted as rigid."""

    notes: EntropyNotes
    rigid_for: Int[Array, "*b k"]


@value
class RigidFor(EntropyBudget):
    """`EntropyBudget` that counts for how many segments each head is rigid before one shows otherwise."""

    def started(self, num_kv_heads: int) -> Any:
        """Return the notes of heads of which nothing has been seen."""
        return Watched(notes=super().started(num_kv_heads), rigid_for=jnp.zeros(num_kv_heads, jnp.int32))

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        opened, notes = super().choose(segment, kept.notes)
        rigid = notes.rigid & jnp.any(segment.visible)
        return opened, Watched(notes=notes, rigid_for=kept.rigid_for + rigid.astype(jnp.int32))


@value
class SizedMass(MassBudget):
    """`MassBudget` of a traced size."""

    left: Number = 0.05

    def __post_init__(self) -> None:
        Budget.__post_init__(self)


@value
class AtRandom(SizedConstant):
    """A constant number of blocks, which chance chooses: what knowing nothing gives."""

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        return super().choose(replace(segment, score=jax.random.uniform(_key(segment), segment.score.shape)), kept)


@value
class Recent(SizedConstant):
    """A constant number of blocks, the newest and the very first one: a window with a sink (StreamingLLM)."""

    def choose(self, segment: Segment, kept: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        place = jnp.arange(segment.score.shape[1], dtype=jnp.float32)
        newest = jnp.where(place == 0, jnp.inf, place)
        return super().choose(replace(segment, score=jnp.broadcast_to(newest, segment.score.shape)), kept)


@pytree
class Reading:
    """What an arm gave of rows of text, at every token with one after it: "r u", in nats, and the share read, "r".

    `read` of `held` blocks, of those before each segment in layers that may leave some out.
    """

    loss: Float[Array, "r u"]
    divergence: Float[Array, "r u"]
    read: Float[Array, " r"]
    held: Float[Array, " r"]


@partial(jax.jit, static_argnames=("plant", "segment"))
def logits_of(
    plant: Plant, params: Params, budget: Budget, tokens: Int[Array, "r u"], *, segment: int
) -> tuple[Float[Array, "r u v"], Float[Array, " r"], Float[Array, " r"], Any]:
    """Return the log-probabilities after every token of rows of whole segments, and of each row blocks read and held.

    Last comes what the budget kept of every layer. No segment is taken for the last.
    """
    (r, u), c = tokens.shape, plant.model
    blocks = u // plant.page_size
    sizes = c.num_layers, c.num_kv_heads, c.head_dim, r * blocks + 1, plant.page_size, params.embedding.dtype
    cache = kv.empty(*sizes, depths=depths_of(arrangement(params, c)))
    table = 1 + jnp.arange(r * blocks, dtype=jnp.int32).reshape(r, blocks)
    fresh = begun(budget, c.num_layers, c.num_kv_heads, probed=False)
    notes = jax.tree.map(lambda x: jnp.broadcast_to(x, (r, *x.shape)), fresh)

    def one(carry: tuple, given: tuple[Array, Array]) -> tuple[tuple, Array]:
        (state, notes), (part, at) = carry, given
        start = jnp.full(r, at, jnp.int32)
        count = jnp.full(r, segment, jnp.int32)
        chunk = Chunk(
            slot=jnp.arange(r, dtype=jnp.int32),
            table=table,
            token=part,
            position=start,
            start=start,
            count=count,
            end=start + count,
        )
        reader = Budgeted(budget=budget, last=jnp.zeros(r, bool), notes=notes)
        found, *after, _ = extend(plant, params, state, chunk, reader)
        return tuple(after), jax.nn.log_softmax(found)

    parts = tokens.reshape(r, -1, segment).swapaxes(0, 1)
    starts = jnp.arange(parts.shape[0], dtype=jnp.int32) * segment
    begin = PlantState(cache=cache, num_cached=jnp.zeros(r, jnp.int32)), notes
    (_, notes), found = jax.lax.scan(one, begin, (parts, starts))
    read, held = (x - _always_read(plant, budget, u, segment) for x in (notes.blocks_read, notes.blocks_held))
    return found.swapaxes(0, 1).reshape(r, u, -1), read, held, notes.kept


def compared(
    dense: Float[Array, "r u v"],
    got: tuple[Float[Array, "r u v"], Float[Array, " r"], Float[Array, " r"], Any],
    following: Int[Array, "r u"],
) -> Reading:
    """Return how an arm's log-probabilities differ from the dense ones."""
    found, read, held, _ = got
    return Reading(
        loss=-jnp.take_along_axis(found, following[..., None], axis=2)[..., 0],
        divergence=jnp.sum(jnp.exp(dense) * (dense - found), axis=2),
        read=read,
        held=held,
    )


def _always_read(plant: Plant, budget: Budget, length: int, segment: int) -> int:
    """The blocks of a row that every arm reads: dense layers, dense segments, and those that hold a segment itself."""
    own, layers = segment // plant.page_size, plant.model.num_layers
    whole = [(start // plant.page_size + own, start < budget.dense_until) for start in range(0, length, segment)]
    sparse_layers = layers - min(budget.dense_layers, layers)
    dense = (layers - sparse_layers) * sum(held for held, _ in whole)
    return plant.model.num_kv_heads * (
        dense + sparse_layers * sum(held if all_read else own for held, all_read in whole)
    )

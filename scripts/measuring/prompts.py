"""Prompts read segment by segment under a budget: what reading less of a prompt does to what is predicted within it.

Every segment is read as prefill reads it, by the same code; its logits are compared with those of dense reading. The
size of a budget is traced, so that one program serves every setting of an arm. No segment counts as a prompt's last.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from et_jax.control.budget import (
    Budget,
    ConstantBudget,
    EntropyBudget,
    HeadBudgets,
    LevelBudget,
    MassBudget,
    begun,
    greatest,
)
from et_jax.control.segment import Segment, block_entropy
from et_jax.decode.attention.budgeted import Budgeted
from et_jax.decode.cache import kv
from et_jax.decode.chunk import Chunk
from et_jax.decode.extend import extend
from et_jax.decode.plant import Plant, PlantState
from et_jax.models.stacks import layers_by_place
from et_jax.serve.engine import Model
from et_jax.types import Number, pytree, replace, static, value

MOST_ROWS, MOST_LOGITS = 4, 2**29  # read at once


def best(segment: Segment, tokens: Float[Array, " k"]) -> Bool[Array, "k n"]:
    """Return the blocks of greatest score that hold so many tokens, of each head.

    What is left of a block is given to some heads by turns, so that any share of the blocks can be had.
    """
    heads = tokens.shape[0]
    turn = ((jnp.arange(heads) + segment.index + segment.layer) % heads).astype(jnp.float32)
    count = jnp.floor(tokens / segment.block_size + (turn + 0.5) / heads).astype(jnp.int32)
    return greatest(segment.score, count, segment.visible)


class Sized:
    """A budget whose size is traced, and so not checked."""

    def __post_init__(self) -> None:
        Budget.__post_init__(self)


@value
class SizedConstant(Sized, ConstantBudget):
    """`ConstantBudget` of a traced size, by score, or the `newest` blocks and the first (StreamingLLM)."""

    tokens: Number = 2048.0
    newest: bool = static(default=False)

    def choose(self, segment: Segment, state: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        shape = segment.score.shape
        if self.newest:
            place = jnp.arange(shape[1], dtype=jnp.float32)
            segment = replace(segment, score=jnp.broadcast_to(jnp.where(place == 0, jnp.inf, place), shape))
        return best(segment, jnp.full(shape[0], self.tokens, jnp.float32)), state


@value
class SizedEntropy(Sized, EntropyBudget):
    """`EntropyBudget` of a traced size; `shuffled`, a head has the budget of another one of its layer, by chance."""

    tokens: Number = 2048.0
    shuffled: bool = static(default=False)

    def choose(self, segment: Segment, state: HeadBudgets) -> tuple[Bool[Array, "k n"], HeadBudgets]:
        """Return the blocks to read, and the budgets."""
        tokens, after = self.given(segment, state)
        key = jax.random.fold_in(jax.random.key(segment.layer), segment.index)
        return best(segment, jax.random.permutation(key, tokens) if self.shuffled else tokens), after


@value
class SizedLevel(Sized, LevelBudget):
    """`LevelBudget` of a traced size."""

    tokens: Number = 2048.0

    def choose(self, segment: Segment, state: Any) -> tuple[Bool[Array, "k n"], Any]:
        """Return the blocks to read."""
        return best(segment, self.tokens * block_entropy(segment)), state


@value
class SizedMass(Sized, MassBudget):
    """`MassBudget` of a traced size."""

    left: Number = 0.05


@pytree
class Reading:
    """What a budget gave of rows, where blocks may be left out: nats a token "r u", and the share of blocks read."""

    divergence: Float[Array, "r u"]
    loss: Float[Array, "r u"]
    share_read: Float[Array, " r"]


class Prompts:
    """A model's rows of text as prompts of whole segments, as many at a time as their logits allow."""

    def __init__(self, model: Model, rows: Int[np.ndarray, "r t"], segment: int) -> None:
        self.model, self.segment = model, segment
        self.batch = min(MOST_ROWS, max(1, MOST_LOGITS // (rows.shape[1] * model.config.vocab_size)))
        length = (rows.shape[1] - 1) // segment * segment
        self.given, self.following = rows[:, :length], rows[:, 1 : length + 1]
        self.dense_until = 2 * segment
        size = model.decoder_config.page_size
        self.plant = Plant(model=model.config, page_size=size, backend="xla", scores_backend="xla")
        self._dense: dict[int, Array] = {}

    @property
    def common(self) -> dict[str, int]:
        """What all budgets share."""
        return {"segment": self.segment, "dense_layers": 1, "dense_until": self.dense_until}

    def run(self, budget: Budget, few: bool = False) -> Reading:
        """Return what a budget gives of all rows, or of the first few."""
        parts = []
        for at in range(0, self.batch if few else len(self.given), self.batch):
            given = self.given[at : at + self.batch]
            if at not in self._dense:
                reads_all = ConstantBudget(segment=self.segment, dense_until=given.shape[1])
                self._dense[at] = logits_of(self.plant, self.model.params, reads_all, given, segment=self.segment)[0]
            got, read, held = logits_of(self.plant, self.model.params, budget, given, segment=self.segment)
            following = self.following[at : at + self.batch]
            parts.append(jax.device_get(_compared(self._dense[at], got, following, read / held, self.dense_until)))
        return jax.tree.map(lambda *each: np.concatenate(each), *parts)


@partial(jax.jit, static_argnames="begin")
def _compared(dense: Array, got: Array, following: Array, share: Array, begin: int) -> Reading:
    return Reading(
        divergence=jnp.sum(jnp.exp(dense) * (dense - got), axis=2)[:, begin:],
        loss=-jnp.take_along_axis(got, following[..., None], axis=2)[:, begin:, 0],
        share_read=share,
    )


@partial(jax.jit, static_argnames=("plant", "segment"))
def logits_of(
    plant: Plant, params: Any, budget: Budget, tokens: Int[Array, "r u"], *, segment: int
) -> tuple[Float[Array, "r u v"], Float[Array, " r"], Float[Array, " r"]]:
    """Return log-probabilities after every token, and of each row the blocks read and held that may be left out."""
    (r, u), c = tokens.shape, plant.model
    blocks = u // plant.page_size
    sizes = c.num_layers, c.num_kv_heads, c.head_dim, r * blocks + 1, plant.page_size, params.embedding.dtype
    cache = kv.empty(*sizes, depths=tuple(map(len, layers_by_place(c))))
    table = 1 + jnp.arange(r * blocks, dtype=jnp.int32).reshape(r, blocks)
    fresh = begun(budget, c.num_layers, c.num_kv_heads, probed=False)
    records = jax.tree.map(lambda x: jnp.broadcast_to(x, (r, *x.shape)), fresh)

    def one(carry: tuple, given: tuple[Array, Array]) -> tuple[tuple, Array]:
        (state, records), (part, at) = carry, given
        start, count = jnp.full(r, at, jnp.int32), jnp.full(r, segment, jnp.int32)
        slot = jnp.arange(r, dtype=jnp.int32)
        chunk = Chunk(slot=slot, table=table, token=part, position=start, start=start, count=count, end=start + count)
        reader = Budgeted(budget=budget, last=jnp.zeros(r, bool), records=records)
        found, *after, _ = extend(plant, params, state, chunk, reader)
        return tuple(after), jax.nn.log_softmax(found)

    parts = tokens.reshape(r, -1, segment).swapaxes(0, 1)
    starts = jnp.arange(parts.shape[0], dtype=jnp.int32) * segment
    begin = PlantState(cache=cache, num_cached=jnp.zeros(r, jnp.int32)), records
    (_, records), found = jax.lax.scan(one, begin, (parts, starts))
    always = _always_read(plant, budget, u, segment)
    return found.swapaxes(0, 1).reshape(r, u, -1), records.blocks_read - always, records.blocks_held - always


def _always_read(plant: Plant, budget: Budget, length: int, segment: int) -> int:
    """The blocks of a row that every arm reads: dense layers, dense segments, and those that hold a segment itself."""
    own, layers = segment // plant.page_size, plant.model.num_layers
    whole = [(start // plant.page_size + own, start < budget.dense_until) for start in range(0, length, segment)]
    sparse_layers = layers - min(budget.dense_layers, layers)
    dense = (layers - sparse_layers) * sum(held for held, _ in whole)
    return plant.model.num_kv_heads * (
        dense + sparse_layers * sum(held if all_read else own for held, all_read in whole)
    )

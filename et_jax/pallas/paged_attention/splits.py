"""Split-KV attention of slots whose lists are walked in stages: the softmax state between stages, and the splits.

The groups of a long list are distributed over splits, each with its own softmax state, which are merged at the end. Two
groups are then multiplied at a time even for a single slot, and no row waits for a longer one.
"""

import dataclasses
from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from et_jax.softmax import finite
from et_jax.types import pytree

NUM_SPLITS = 2  # measured on x86-64 with two cores


@pytree
class Running:
    """The online softmax state of each query: its maximum score, the sum relative to it, and the mixed values."""

    maximum: Float[Array, "*b k r g"]
    total: Float[Array, "*b k r g"]
    mixed: Float[Array, "*b k r g w"]


@pytree
class Slots:
    """The slots to walk, with their softmax state so far."""

    query: Float[Array, "*b r h d"]
    page_table: Int[Array, "*b n"]
    blocks: Int[Array, "*b k m"]
    counts: Int[Array, "*b k"]
    readers: Int[Array, "*b k m"] | None
    lengths: Int[Array, "*b r"]
    running: Running

    @property
    def longest(self) -> Int[Array, "*b"]:
        """The length of the longest list of each slot."""
        return jnp.max(self.counts, axis=-1)


def begun(shape: tuple[int, ...], sinks: Float[Array, " h"] | None = None) -> Running:
    """Return the initial softmax state: a sink is one more logit without a value."""
    rows = shape[:-1]
    maximum, total = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    if sinks is not None:
        maximum, total = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(rows[1], 1, -1), rows), jnp.ones_like(total)
    return Running(maximum=maximum, total=total, mixed=jnp.zeros(shape, jnp.float32))


def in_splits(
    walk: Callable[[Slots], tuple[Running, Float[Array, "n k r g m"]]], group: int, slot: Slots
) -> tuple[Running, Float[Array, "k r g m"]]:
    """Return the softmax state of one slot after its lists, whose groups are distributed over parallel splits."""
    (k, m), n = slot.blocks.shape, NUM_SPLITS
    padding = -m % (n * group)

    def dealt(ids: Int[Array, "k m"]) -> Int[Array, "n k w"]:
        ids = jnp.pad(ids, ((0, 0), (0, padding))).reshape(k, -1, n, group)
        return jnp.moveaxis(ids, 2, 0).reshape(n, k, -1)

    last = slot.counts % (n * group) - group * jnp.arange(n, dtype=jnp.int32)[:, None]
    splits = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), slot)
    found, block_lse = walk(
        dataclasses.replace(
            splits,
            blocks=dealt(slot.blocks),
            counts=slot.counts // (n * group) * group + jnp.clip(last, 0, group),
            readers=None if slot.readers is None else dealt(slot.readers),
            running=begun(splits.running.mixed.shape),
        )
    )
    parts = [slot.running, *(jax.tree.map(lambda x, i=i: x[i], found) for i in range(n))]
    maximum = reduce(jnp.maximum, (part.maximum for part in parts))
    weights = lax.optimization_barrier([part.maximum - finite(maximum) for part in parts])
    weights = [jnp.exp(weight) for weight in weights]
    running = Running(
        maximum=maximum,
        total=sum(part.total * weight for part, weight in zip(parts, weights, strict=True)),
        mixed=sum(part.mixed * weight[..., None] for part, weight in zip(parts, weights, strict=True)),
    )
    block_lse = jnp.moveaxis(block_lse.reshape(n, *block_lse.shape[1:-1], -1, group), 0, -2)
    return running, block_lse.reshape(*block_lse.shape[:3], -1)[..., :m]

"""Slots whose lists are walked in parts: what a softmax has come to between them, and a part walked in lanes.

The groups of a long list are dealt to lanes, each with a softmax of its own, which are put together at the end. So two
groups are multiplied at a time though one slot alone is walked, and no row waits for one that is longer.
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

LANES = 2  # measured on x86-64 with two cores


@pytree
class Running:
    """What the softmax of each query has come to: its greatest score, the sum below it, and the values mixed."""

    maximum: Float[Array, "*b k r g"]
    total: Float[Array, "*b k r g"]
    mixed: Float[Array, "*b k r g w"]


@pytree
class Slots:
    """What is walked of slots, and what their softmax came to before."""

    query: Float[Array, "*b r h d"]
    page_table: Int[Array, "*b n"]
    blocks: Int[Array, "*b k m"]
    counts: Int[Array, "*b k"]
    readers: Int[Array, "*b k m"] | None
    lengths: Int[Array, "*b r"]
    running: Running

    @property
    def longest(self) -> Int[Array, "*b"]:
        """How many entries the longest list of each slot has."""
        return jnp.max(self.counts, axis=-1)


def begun(shape: tuple[int, ...], sinks: Float[Array, " h"] | None = None) -> Running:
    """What a softmax starts from: a sink is one more logit, which mixes nothing in."""
    rows = shape[:-1]
    maximum, total = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32)
    if sinks is not None:
        maximum, total = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(rows[1], 1, -1), rows), jnp.ones_like(total)
    return Running(maximum=maximum, total=total, mixed=jnp.zeros(shape, jnp.float32))


def in_lanes(
    walk: Callable[[Slots], tuple[Running, Float[Array, "n k r g m"]]], group: int, slot: Slots
) -> tuple[Running, Float[Array, "k r g m"]]:
    """The softmax of one slot after its lists too, of which the groups are dealt to lanes that are walked together."""
    (k, m), n = slot.blocks.shape, LANES
    padding = -m % (n * group)

    def dealt(ids: Int[Array, "k m"]) -> Int[Array, "n k w"]:
        ids = jnp.pad(ids, ((0, 0), (0, padding))).reshape(k, -1, n, group)
        return jnp.moveaxis(ids, 2, 0).reshape(n, k, -1)

    last = slot.counts % (n * group) - group * jnp.arange(n, dtype=jnp.int32)[:, None]
    lanes = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), slot)
    found, block_lse = walk(
        dataclasses.replace(
            lanes,
            blocks=dealt(slot.blocks),
            counts=slot.counts // (n * group) * group + jnp.clip(last, 0, group),
            readers=None if slot.readers is None else dealt(slot.readers),
            running=begun(lanes.running.mixed.shape),
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

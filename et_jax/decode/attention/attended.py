"""Attention over selected blocks: their shares of mass, and the residual of the unread blocks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from et_jax.control import bounds
from et_jax.control.base import unpack_blocks
from et_jax.decode.attention.blocks import Blocks, LayerKind
from et_jax.decode.attention.selection import SelectedBlocks
from et_jax.decode.attention.summaries import PIECE, mean_values
from et_jax.pallas.add_residual import add_residual
from et_jax.pallas.backend import platform
from et_jax.pallas.per_head import Listed, PerHead, PerQuery, PerRow, per_head
from et_jax.softmax import with_sink
from et_jax.sums import log_sum_exp, softmax, total
from et_jax.types import pytree


@pytree
class AttendedMass:
    """The attention masses of every row and KV head, after attention over the selected blocks.

    `kept` is the least share of attention mass on the selected blocks: certain if the selector bounds the rest,
    otherwise unread blocks count by its estimates. `mass` is the share of every block, `residual` the masses of the
    unread ones; each is None unless requested.
    """

    kept: Float[Array, "*b g"]
    mass: Float[Array, "*b g n"] | None
    residual: "Residual | None"


@pytree
class Residual:
    """The attention masses of the unread blocks, 0 for others, of the attended blocks, and of all, in one unit."""

    weight: Float[Array, "*b g n"]
    read: Float[Array, "*b g"]
    denominator: Float[Array, "*b g"]


def attended_mass(
    selected: SelectedBlocks,
    lengths: Int[Array, " b"],
    block_lse: Float[Array, "b k g m"],
    sinks: Float[Array, "k g"] | None,
    layer: LayerKind,
    residual: bool,
) -> AttendedMass:
    """Return the attention masses after attention over the selected blocks.

    `block_lse` is the log-sum-exp of each block, in nats, in the order of the list. `sinks` are those of the layer's
    softmax.
    """
    shares = selected.shares

    def of_one(
        mask: UInt32[Array, " n32"],
        estimate: Float[Array, "g n"],
        upper: Float[Array, "g n"] | None,
        length: Int[Array, ""],
        by_list: Float[Array, "g n"],
        sink: Float[Array, " g"] | None,
        block_lse: Float[Array, "g n"] | None,
    ) -> AttendedMass:
        own = layer.extent(length, estimate.shape[1])
        opened = unpack_blocks(mask)[: len(own.readable)]
        unread, log_read = own.readable & ~opened, log_sum_exp(by_list)
        if shares:
            estimate = in_units_read(estimate, unread, log_read)
        unseen = estimate if upper is None else upper
        return AttendedMass(
            kept=bounds.certain_share(unseen, opened | ~own.readable, log_read),
            mass=None if block_lse is None else shares_after(estimate, opened, own.readable, block_lse),
            residual=_residual(estimate, unread, with_sink(log_read, sink)) if residual else None,
        )

    # A list has room for the blocks of the page table. On a GPU selectors use a power of two of blocks.
    short = selected.estimate.shape[-1] - block_lse.shape[-1]
    block_lse = jnp.pad(block_lse, [(0, 0)] * 3 + [(0, short)], constant_values=-jnp.inf)
    at_place = None if selected.place is None else Listed(array=block_lse, place=selected.place)
    return per_head(
        of_one,
        PerHead(array=selected.mask),
        PerQuery(array=selected.estimate),
        None if selected.upper is None else PerQuery(array=selected.upper),
        PerRow(array=lengths),
        PerQuery(array=block_lse),
        None if sinks is None else PerQuery(array=sinks[None]),
        at_place,
    )


def in_units_read(
    share: Float[Array, "g n"], unread: Bool[Array, " n"], log_read: Float[Array, " g"]
) -> Float[Array, "g n"]:
    """Return estimated log shares of the mass in the units of `log_read`: unread blocks have their estimated share.

    At most half of the mass is assumed unread.
    """
    left = jnp.minimum(total(jnp.where(unread, jnp.exp(share), 0.0)), 0.5)
    return share + (log_read - jnp.log1p(-left))[:, None]


def shares_after(
    estimate: Float[Array, "g n"], opened: Bool[Array, " n"], readable: Bool[Array, " n"], read: Float[Array, "g n"]
) -> Float[Array, "g n"]:
    """Return each block's share of attention mass, 1 for blocks that are not readable.

    Attended blocks count by `read`, the log-sum-exps of their keys; the others count by their estimates.
    """
    log_mass = jnp.where(opened, read, estimate)
    return jnp.where(readable, softmax(jnp.where(readable, log_mass, jnp.finfo(jnp.float32).min)), 1.0)


def _residual(estimate: Float[Array, "g n"], unread: Bool[Array, " n"], log_read: Float[Array, " g"]) -> Residual:
    left = jnp.where(unread, estimate, -jnp.inf)
    top = jnp.maximum(jnp.max(left, axis=-1), log_read)
    top = jnp.where(jnp.isfinite(top), top, 0.0)[..., None]
    weight, read = jnp.exp(left - top), jnp.exp(log_read[..., None] - top)[..., 0]
    return Residual(weight=weight, read=read, denominator=read + total(weight))


def with_residual(
    out: Float[Array, "q h d"], residual: Residual, blocks: Blocks, mean: Float[Array, "k p e"]
) -> Float[Array, "q h d"]:
    """Return the output with every unread block counted as its mean value at its estimated mass.

        o~ = (Z_S o + sum_D Z^_b mean_b) / (Z_S + sum_D Z^_b)

    S are the attended blocks, D the other readable ones. `out` is o over S, and `bounds.residual_error` bounds the
    error. Z_S is the sum that `out` was divided by, including a sink. `mean` is that of every page, as
    `PageSummary` has it. Sums are in float32. On a GPU rows past those of the `residual` become 0.
    """
    read, weight, denominator = residual.read, residual.weight, residual.denominator
    if platform() == "gpu":
        return add_residual(out, read, weight, denominator, mean, blocks.table, turn=blocks.turn, depth=blocks.depth)
    attended = out.astype(jnp.float32).reshape(*read.shape, -1)
    mixed = _mixture(weight, mean, blocks, attended.shape[-1])
    mixed = (read[..., None] * attended + mixed) / jnp.where(denominator > 0, denominator, 1.0)[..., None]
    return mixed.astype(out.dtype).reshape(out.shape)


def _mixture(
    weight: Float[Array, "b k g n"], mean: Float[Array, "k p e"], blocks: Blocks, head_dim: int
) -> Float[Array, "b k g d"]:
    """Return the sum of the mean values of the blocks, each times its weight.

    A CPU adds pieces up to the longest row, so the cost follows the tokens in the cache. Further pieces add 0.
    """

    def mixture(weight: Float[Array, "b k g m"], table: Int[Array, "b m"]) -> Float[Array, "b k g d"]:
        value = jnp.where(
            jnp.any(weight > 0, axis=2)[..., None], mean_values(mean, table, head_dim), 0.0
        )  # 0 * NaN is NaN
        return jnp.einsum("bkgm,bkmd->bkgd", weight, value, precision=jax.lax.Precision.HIGHEST)

    if platform() != "cpu":
        return mixture(weight, blocks.table)
    n = blocks.table.shape[1]
    padded = [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % PIECE)]) for x in (weight, blocks.table)]

    def step(i: Int[Array, ""], mixed: Float[Array, "b k g d"]) -> Float[Array, "b k g d"]:
        piece = [jax.lax.dynamic_slice_in_dim(x, i * PIECE, PIECE, axis=x.ndim - 1) for x in padded]
        # the barrier keeps XLA from computing the pages again for every element of the gather
        return mixed + mixture(*jax.lax.optimization_barrier(piece))

    steps = (blocks.most_blocks + PIECE - 1) // PIECE
    return jax.lax.fori_loop(0, steps, step, jnp.zeros((*weight.shape[:3], head_dim), jnp.float32))

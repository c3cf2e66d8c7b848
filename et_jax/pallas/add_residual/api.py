"""Attention output plus the mean values of unread blocks; picks a backend."""

import jax
from jaxtyping import Array, Float, Int

from et_jax.pallas.backend import kernel

BACKENDS = {name: kernel("add_residual", name) for name in ("reference", "gpu")}


def add_residual(
    out: Float[Array, "q h d"],
    read: Float[Array, "b k g"],
    weight: Float[Array, "b k g n"],
    total: Float[Array, "b k g"],
    mean: Float[Array, "k p e"],
    table: Int[Array, "b n"],
    *,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
    backend: str = "gpu",
) -> Float[Array, "q h d"]:
    """Return attention output with blocks added as their mean values, each at its weight, in the dtype of `out`.

        (read out + sum_b weight_b mean_b) / total          in float32; a `total` of 0 is replaced by 1

    out: query heads by KV head, h = k g; rows past those of `read` become 0.
    mean: the mean value of every page in [..., d:2d]. Pages whose weights are all 0 may contain anything.
    table: the page of every block.
    turn: for a pool shared equally by `depth` layers, the layer whose pages the table numbers; None for one layer.

    A row's bits depend only on that row, and not on further blocks of weight 0.
    """
    with jax.named_scope(f"add_residual/{backend}"):
        return BACKENDS[backend](out, read, weight, total, mean, table, turn=turn, depth=depth)

"""Rotary embedding, and the store of new keys and values into their pages; picks a backend."""

import jax
from jaxtyping import Array, Float, Int

from et_jax.pallas.backend import kernel

BACKENDS = {name: kernel("rotate_store", name) for name in ("reference", "gpu")}


def rotate_store(
    q: Float[Array, "n h d"],
    k: Float[Array, "n k d"],
    v: Float[Array, "n k d"],
    cosine: Float[Array, "n r"],
    sine: Float[Array, "n r"],
    pages: Float[Array, "k p s e"],
    table: Int[Array, "b m"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    turn: Int[Array, "1"],
    *,
    depth: int,
    columns: int,
    backend: str = "gpu",
) -> tuple[Float[Array, "n k c d"], Float[Array, "k p s e"]]:
    """Return the rotated queries of b rows, and the pages with one new token of each row.

    All three products are first rounded to the dtype of the pages. Of queries and keys, channel i < r is paired with
    channel i + r, and channels from 2r on are unchanged:

        x_i cosine_i - x_(i+r) sine_i,  x_(i+r) cosine_i + x_i sine_i               computed in float32

    The result has `columns` queries of each KV head: its h / k, then zeros. Rows past b are undefined.

    table: a row's token is at position `start` of the pages that its table lists. A row whose `count` is 0 stores
        nothing.
    turn: the pool is shared equally by `depth` layers, and the table numbers the pages of this one.

    Without the kernel XLA launches one program for the queries and one for the pages. A row's bits depend only on that
    row.
    """
    with jax.named_scope(f"rotate_store/{backend}"):
        run = BACKENDS[backend]
        return run(q, k, v, cosine, sine, pages, table, start, count, turn, depth=depth, columns=columns)

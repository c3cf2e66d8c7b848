"""Decode attention over a paged KV cache: the one door, which checks its arguments and picks a backend."""

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.backend import NAMES, kernel, resolve
from et_jax.pallas.checks import require, require_integers, require_pool, require_shape
from et_jax.pallas.paged_attention import xla
from et_jax.pallas.workspace import Workspace
from et_jax.softmax import Softmax

BACKENDS = {name: kernel("paged_attention", name) for name in NAMES}
MOST_READERS = 31  # bits of an int32 that are not its sign


def shares_pages(backend: str, group: int) -> bool:
    """Return whether rows of a slot that list the same blocks are read them once, at so many queries a KV head.

    On a CPU one query alone is multiplied by other instructions than two, and rounded otherwise.
    """
    return shares_lists(backend) or (backend == "xla" and group > 1)


def shares_lists(backend: str) -> bool:
    """Return whether rows of a slot are read their blocks once whatever each lists, their `readers` told.

    Blocks are summed together in other groups than where each row has its own list, and rounded otherwise.
    """
    return backend in ("gpu", "tpu")


def paged_attention(
    q: Float[Array, "r h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"],
    counts: Int[Array, "b k"],
    lengths: Int[Array, " r"],
    *,
    softmax: Softmax,
    rows_per_slot: int = 1,
    readers: Int[Array, "b k m"] | None = None,
    kv_scales: Float[Array, "k p 2 s"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "r h d"], Float[Array, "r h m"]]:
    """Return attention of one query a row over the blocks listed for its slot, and each block's log-sum-exp.

    With z_j the scores that `softmax` describes, over the tokens j seen:

        out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink))        in the dtype of q
        block_lse[block] = log sum_(j in block) exp(z_j)               float32, without the sink

    pages: a token's key in [..., :d], its value in [..., d:2d], e = 2d padded to a multiple of 128.
        Page 0 is the null page; it may hold anything.
    blocks: logical block ids, strictly ascending, of which the first counts[b, k] hold. Block i of slot b
        lies in page page_table[b, i] and holds the tokens at positions [i s, (i + 1) s).
    lengths: tokens in the cache, the query's own included: it stands at lengths - 1. A token is seen if
        its block is listed, its position below the length and, with a window, less than `window` behind.
    rows_per_slot: row i is one of slot i // rows_per_slot: rows of a slot share its table and its lists, and a
        backend may read the pages once for all of them. What stands in a listed block within the sight of one row of
        the slot, by its length and the window, must be finite for all.
    readers: of every listed block, the rows of the slot that read it, row j by bit j; None is all of them. So the list
        is the union of the rows' own. A row that does not read a block sees nothing of it.
    kv_scales: of a pool in 8 bits (int8, or float8_e4m3fn), whose codes are finite: what the keys and what the values
        of each token are multiplied by.

    Query head h reads KV head h // (h / k). Softmax and sums run in float32. Where nothing is seen, out is
    0 and block_lse -inf, never NaN. A row's bits depend on its slot's list and contents alone, and not on how
    far the list is padded; on `xla` not on the rows beside it in the slot either. Sources: pages, Kwon et al. 2023;
    online softmax, Milakov & Gimelshein 2018.
    """
    rows, h, _ = q.shape
    k = pages.shape[0]
    holds = rows_per_slot >= 1 and rows % rows_per_slot == 0
    require(holds, "rows_per_slot", rows_per_slot, f"a number that divides the {rows} rows of q")
    b = rows // rows_per_slot
    require_pool(q, pages, head_axis=1, kv_scales=kv_scales)
    require_shape("page_table", page_table, (b, None), "b n")
    require_shape("blocks", blocks, (b, k, None), "b k m")
    require(blocks.shape[-1] >= 1, "blocks", f"shape {blocks.shape}", "room for at least one block")
    require_shape("counts", counts, (b, k), "b k")
    require_shape("lengths", lengths, (rows,), "r")
    for name, array in {"page_table": page_table, "blocks": blocks, "counts": counts, "lengths": lengths}.items():
        require_integers(name, array)
    softmax.require_heads(h)
    if readers is not None:
        require_shape("readers", readers, blocks.shape, "b k m")
        require_integers("readers", readers)
        require(rows_per_slot <= MOST_READERS, "rows_per_slot", rows_per_slot, f"at most {MOST_READERS} with readers")
    name = resolve(backend, BACKENDS)
    with jax.named_scope(f"paged_attention/{name}"):
        return BACKENDS[name](
            q,
            pages,
            page_table,
            blocks,
            counts,
            lengths,
            softmax=softmax,
            rows_per_slot=rows_per_slot,
            readers=readers,
            kv_scales=kv_scales,
        )


def workspace(
    *, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: DTypeLike
) -> Workspace:
    """Return about what a call of so many rows over a pool of this dtype sets aside on the default device."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return xla.workspace(rows=rows, **heads, page_size=page_size, dtype=dtype)

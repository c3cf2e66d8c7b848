"""Decode attention over a paged KV cache: the one door, which checks its arguments and picks a backend."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.backend import NAMES, kernel, resolve
from et_jax.pallas.checks import require, require_integers, require_pool, require_shape
from et_jax.pallas.paged_attention import xla
from et_jax.pallas.paged_attention.lists import listed
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


def padded_heads(group: int) -> int:
    """Return how many queries the kernel for GPUs reads of a KV head that has a group of so many."""
    return kernel("paged_attention", "gpu", "columns")(group)


def paged_attention(
    q: Float[Array, "q c d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    blocks: Int[Array, "b k m"] | None,
    counts: Int[Array, "b k"] | None,
    lengths: Int[Array, " r"],
    *,
    softmax: Softmax,
    skipped: Int[Array, "b k"] | None = None,
    turn: Int[Array, ""] | None = None,
    depth: int = 1,
    rows_per_slot: int = 1,
    readers: Int[Array, "b k m"] | None = None,
    kv_scales: Float[Array, "k p 2 s"] | None = None,
    block_sums: bool = True,
    num_heads: int | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "q h d"], Float[Array, "q h m"] | None]:
    """Return attention of one query a row over the blocks listed for its slot, and each block's log-sum-exp.

    With z_j the scores that `softmax` describes, over the tokens j seen:

        out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink))        in the dtype of q
        block_lse[block] = log sum_(j in block) exp(z_j)               float32, without the sink

    q: queries past the rows of `lengths` are nobody's, for callers that multiply a number of rows of their own: what
        comes of them is 0 and -inf.
    pages: a token's key in [..., :d], its value in [..., d:2d], e = 2d padded to a multiple of 128.
        Page 0 is the null page; it may hold anything.
    blocks: logical block ids, strictly ascending, of which the first counts[b, k] hold. Block i of slot b
        lies in page page_table[b, i] and holds the tokens at positions [i s, (i + 1) s). None, without counts: the
        blocks in order from the first that a row of the slot sees, m as many as there may be.
    skipped: where there are no lists, the blocks at the beginning that are left out, as many for all rows of a slot.
    turn: of a pool that `depth` layers share equally, the layer whose pages the table numbers; None is of one layer.
    lengths: tokens in the cache, the query's own included: it stands at lengths - 1. A token is seen if
        its block is listed, its position below the length and, with a window, less than `window` behind.
    rows_per_slot: row i is one of slot i // rows_per_slot: rows of a slot share its table and its lists, and a
        backend may read the pages once for all of them. What stands in a listed block within the sight of one row of
        the slot, by its length and the window, must be finite for all.
    readers: of every listed block, the rows of the slot that read it, row j by bit j; None is all of them. So the list
        is the union of the rows' own. A row that does not read a block sees nothing of it.
    kv_scales: of a pool in 8 bits (int8, or float8_e4m3fn), whose codes are finite: what the keys and what the values
        of each token are multiplied by.
    block_sums: whether `block_lse` is returned, else None. A kernel for GPUs writes it in its last launch.
    num_heads: h, None where q has no other heads. Otherwise the first of each KV head's are its query heads, and the
        others are 0. The kernel for GPUs takes `padded_heads` of them, of slots of one row; others it pads by a launch.

    Query head h reads KV head h // (h / k). Softmax and sums run in float32. Where nothing is seen, out is
    0 and block_lse -inf, never NaN. A row's bits depend on its slot's list and contents alone, and not on how
    far the list is padded; on `xla` not on the rows beside it in the slot either. Sources: pages, Kwon et al. 2023;
    online softmax, Milakov & Gimelshein 2018.
    """
    (past, h, _), rows = q.shape, lengths.shape[0]
    past, k = past - rows, pages.shape[0]
    name = resolve(backend, BACKENDS)
    if num_heads is not None and num_heads < h:
        require(h % k == num_heads % k == 0, "num_heads", num_heads, f"a multiple of the {k} KV heads, as the {h} of q")
        if name != "gpu":
            q = q.reshape(len(q), k, h // k, -1)[:, :, : num_heads // k].reshape(len(q), num_heads, -1)
        h = num_heads
    holds = rows_per_slot >= 1 and rows % rows_per_slot == 0
    require(holds, "rows_per_slot", rows_per_slot, f"a number that divides the {rows} rows of q")
    require(past >= 0, "lengths", f"shape {lengths.shape}", f"at most the {past + rows} rows of q")
    b = rows // rows_per_slot
    require_pool(q, pages, head_axis=1, kv_scales=kv_scales)
    require_shape("page_table", page_table, (b, None), "b n")
    require_shape("lengths", lengths, (rows,), "r")
    require((blocks is None) == (counts is None), "counts", counts, "lists and their lengths, or neither")
    if blocks is not None and counts is not None:
        require_shape("blocks", blocks, (b, k, None), "b k m")
        require(blocks.shape[-1] >= 1, "blocks", f"shape {blocks.shape}", "room for at least one block")
        require_shape("counts", counts, (b, k), "b k")
        require(skipped is None, "skipped", skipped, "None where there are lists")
    if skipped is not None:
        require_shape("skipped", skipped, (b, k), "b k")
    integers = {"page_table": page_table, "blocks": blocks, "counts": counts, "lengths": lengths, "skipped": skipped}
    for argument, array in integers.items():
        if array is not None:
            require_integers(argument, array)
    softmax.require_heads(h)
    require(readers is None or blocks is not None, "blocks", "None", "lists of blocks with readers")
    if readers is not None and blocks is not None:
        require_shape("readers", readers, blocks.shape, "b k m")
        require_integers("readers", readers)
        require(rows_per_slot <= MOST_READERS, "rows_per_slot", rows_per_slot, f"at most {MOST_READERS} with readers")
    more = {}
    if name == "gpu":  # each launch of a kernel costs there: its own finds blocks and pages
        more = {"skipped": skipped, "turn": turn, "depth": depth, "block_sums": block_sums, "num_heads": h}
    else:
        if turn is not None:
            page_table = page_table + turn * (pages.shape[1] // depth)
        if blocks is None:
            blocks, counts = listed(lengths, rows_per_slot, page_table.shape[1], k, pages.shape[2], softmax, skipped)
    with jax.named_scope(f"paged_attention/{name}"):
        out, block_lse = BACKENDS[name](
            q if name == "gpu" else q[:rows],
            pages,
            page_table,
            blocks,
            counts,
            lengths,
            softmax=softmax,
            rows_per_slot=rows_per_slot,
            readers=readers,
            kv_scales=kv_scales,
            **more,
        )
        if len(out) < len(q):
            around = [(0, past), (0, 0), (0, 0)]
            out, block_lse = jnp.pad(out, around), jnp.pad(block_lse, around, constant_values=-jnp.inf)
        return out, block_lse if block_sums else None


def workspace(
    *, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: DTypeLike
) -> Workspace:
    """Return about what a call of so many rows over a pool of this dtype sets aside on the default device."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return xla.workspace(rows=rows, **heads, page_size=page_size, dtype=dtype)

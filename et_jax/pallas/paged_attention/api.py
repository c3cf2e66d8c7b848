"""Decode attention over a paged KV cache: checks its arguments and picks a backend."""

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
MOST_READERS = 31  # bits of an int32 except its sign


def shares_pages(backend: str, group: int) -> bool:
    """Return whether a backend reads blocks once for all rows of a slot with equal lists, at this query group size.

    On a CPU a single query uses other multiply instructions than two do, which round differently.
    """
    return shares_lists(backend) or (backend == "xla" and group > 1)


def shares_lists(backend: str) -> bool:
    """Return whether a backend reads blocks once for all rows of a slot with different lists, given their `readers`.

    Blocks are grouped differently than with one list per row, so sums round differently.
    """
    return backend in ("gpu", "tpu")


def padded_heads(group: int) -> int:
    """Return how many queries per KV head the kernel for GPUs reads for a group of this size."""
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

    With z_j the scores that `softmax` describes, over the visible tokens j:

        out = sum_j exp(z_j) v_j / (sum_j exp(z_j) + exp(sink))        in the dtype of q
        block_lse[block] = log sum_(j in block) exp(z_j)               float32, without the sink

    q: queries past the rows of `lengths` are padding, for callers with a fixed number of rows; their
        results are 0 and -inf.
    pages: a token's key in [..., :d], its value in [..., d:2d], e = 2d padded to a multiple of 128.
        Page 0 is the null page; it may contain anything.
    blocks: logical block ids, strictly ascending, of which the first counts[b, k] are valid. Block i of slot b
        is page page_table[b, i], with the tokens at positions [i s, (i + 1) s). None, without counts: the
        blocks in order from the first that a row of the slot attends to, m as many as there may be.
    skipped: without lists, the number of leading blocks to skip, the same for all rows of a slot.
    turn: for a pool shared equally by `depth` layers, the layer whose pages the table numbers; None for one layer.
    lengths: tokens in the cache, including the query's own, which is at position lengths - 1. A token is visible if
        its block is listed, its position below the length and, with a window, less than `window` behind.
    rows_per_slot: row i belongs to slot i // rows_per_slot: rows of a slot share its table and its lists, and a
        backend may read the pages once for all of them. Tokens of a listed block that are visible to one row of
        the slot, by its length and the window, must be finite for all.
    readers: for every listed block, the rows of the slot that read it, row j as bit j; None is all of them. The list
        is the union of the rows' own lists. A row's result does not depend on blocks that it does not read.
    kv_scales: for a pool in 8 bits (int8, or float8_e4m3fn) with finite codes: the scale of the key and of the value
        of each token.
    block_sums: whether `block_lse` is returned, else None. The kernel for GPUs writes it in its last launch.
    num_heads: h, None if q has no padded heads. Otherwise the first of each KV head's are its query heads, and the
        others are 0. The kernel for GPUs requires `padded_heads` of them for slots of one row; else a launch pads them.

    Query head h reads KV head h // (h / k). Softmax and sums run in float32. If no token is visible, out is
    0 and block_lse -inf, never NaN. A row's bits depend only on its slot's list and contents, and not on
    the padding of the list; on `xla` not on the other rows of the slot either. Sources: pages, Kwon et al. 2023;
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
        require(skipped is None, "skipped", skipped, "None with lists")
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
    if name == "gpu":  # launch-bound: its kernel finds blocks and pages itself
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
    """Return an estimate of the temporaries of a call on the default device, for a pool of this dtype."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return xla.workspace(rows=rows, **heads, page_size=page_size, dtype=dtype)

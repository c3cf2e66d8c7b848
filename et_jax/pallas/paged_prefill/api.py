"""Prefill attention over a paged KV cache: checks its arguments and picks a backend."""

import jax
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.backend import NAMES, kernel, resolve
from et_jax.pallas.checks import require, require_integers, require_pool, require_shape
from et_jax.pallas.paged_prefill import xla
from et_jax.pallas.workspace import Workspace
from et_jax.softmax import Softmax

BACKENDS = {name: kernel("paged_prefill", name) for name in NAMES}


def paged_prefill(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    starts: Int[Array, " b"],
    *,
    blocks: Int[Array, "b k m"] | None = None,
    counts: Int[Array, "b k"] | None = None,
    block_lse: bool = False,
    softmax: Softmax,
    kv_scales: Float[Array, "k p 2 s"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t h m"] | None]:
    """Return causal attention of t new queries a row, at positions starts .. starts + t - 1, and optional block sums.

    With z_ij the scores that `softmax` describes, over the tokens j <= i of the listed blocks and, with a window,
    i - j < window:

        out_i = sum_j exp(z_ij) v_j / (sum_j exp(z_ij) + exp(sink))        in the dtype of q
        lse_i[block] = log sum_(j in block) exp(z_ij)                      float32, without the sink

    pages: as in `paged_attention`, with the new tokens' own keys and values. The token at
        position j of row b is in page page_table[b, j // s].
    blocks, counts: given together, lists as in `paged_attention`: logical ids, strictly ascending, of which the
        first counts[b, k] are valid. Every query of the chunk reads exactly these blocks, so the blocks of
        the chunk itself belong in the list. None: every block that is not in the future, as if all blocks of
        the row were listed; bitwise identical except on `xla`.
    kv_scales: for a pool in 8 bits, as in `paged_attention`.
    block_lse: also return lse, where m counts the entries of a list or, without lists, of the page table; else None.

    Query head h reads KV head h // (h / k). Softmax and sums run in float32. If no token is visible, out is 0
    and lse -inf. Invisible tokens may be NaN; a visible NaN makes the query's `out` NaN. Queries past
    the end of the real tokens have undefined rows; no other row depends on them or on their keys and values.
    """
    b, _, h, _ = q.shape
    k = pages.shape[0]
    require_pool(q, pages, head_axis=2, kv_scales=kv_scales)
    require_shape("page_table", page_table, (b, None), "b n")
    require_shape("starts", starts, (b,), "b")
    require_integers("page_table", page_table)
    require_integers("starts", starts)
    require(counts is None or blocks is not None, "blocks", "None", "lists of blocks with counts")
    if blocks is not None:
        require(counts is not None, "counts", "None", "the lengths of the lists in blocks")
        require_shape("blocks", blocks, (b, k, None), "b k m")
        require(blocks.shape[-1] >= 1, "blocks", f"shape {blocks.shape}", "room for at least one block")
        require_shape("counts", counts, (b, k), "b k")
        require_integers("blocks", blocks)
        require_integers("counts", counts)
    softmax.require_heads(h)
    name = resolve(backend, BACKENDS)
    with jax.named_scope(f"paged_prefill/{name}"):
        return BACKENDS[name](
            q,
            pages,
            page_table,
            starts,
            blocks=blocks,
            counts=counts,
            block_lse=block_lse,
            softmax=softmax,
            kv_scales=kv_scales,
        )


def workspace(*, rows: int, chunk: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> Workspace:
    """Return an estimate of the temporaries of a call with `rows` rows of a chunk of queries."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return xla.workspace(rows=rows, chunk=chunk, **heads, page_size=page_size)

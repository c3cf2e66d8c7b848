"""Prefill attention over a paged KV cache: the one door, which checks its arguments and picks a backend."""

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
    """Return causal attention of t new queries a row, at positions starts .. starts + t - 1, and block sums if asked.

    With z_ij the scores that `softmax` describes, over the tokens j <= i of the listed blocks and, with a window,
    i - j < window:

        out_i = sum_j exp(z_ij) v_j / (sum_j exp(z_ij) + exp(sink))        in the dtype of q
        lse_i[block] = log sum_(j in block) exp(z_ij)                      float32, without the sink

    pages: as in `paged_attention`; the new tokens' own keys and values are already there. The token at
        position j of row b lies in page page_table[b, j // s].
    blocks, counts: given together, lists as in `paged_attention`: logical ids, strictly ascending, of which the
        first counts[b, k] hold. Every query of the chunk reads these blocks and no other, so those that hold
        the chunk itself belong in the list. None: every block that is not in the future, as if each block of
        the row were listed; with the same bits but on `xla`.
    kv_scales: of a pool in 8 bits, as in `paged_attention`.
    block_lse: return lse too, where m counts the entries of a list or, with none, of the page table; else None.

    Query head h reads KV head h // (h / k). Softmax and sums run in float32. Where nothing is seen, out is 0
    and lse -inf. What no query sees may be NaN; what a query sees and is NaN makes its `out` NaN. Queries past
    the end of the real tokens give rows to be ignored; no other row depends on them or on their keys and values.
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
    """Return about what a call of so many rows of a chunk of queries sets aside."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return xla.workspace(rows=rows, chunk=chunk, **heads, page_size=page_size)

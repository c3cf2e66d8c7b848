"""The definition of `paged_attention`, in plain jax.numpy: for reading, not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas.folding import split
from et_jax.softmax import Softmax


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
) -> tuple[Float[Array, "r h d"], Float[Array, "r h m"]]:
    """Return what `api.paged_attention` documents."""
    page_table, blocks, counts, readers = split(rows_per_slot, 1, page_table, blocks, counts, readers=readers)
    b, h, d = q.shape
    k, _, s, _ = pages.shape
    m = blocks.shape[2]
    grouped = q.astype(jnp.float32).reshape(b, k, h // k, d)

    # every token of every listed block, and whether it is visible to the query
    listed = jnp.arange(m, dtype=jnp.int32) < counts[..., None]
    if readers is not None:
        listed &= readers & 1 == 1
    blocks = jnp.where(listed, blocks, 0)
    page = page_table[jnp.arange(b)[:, None, None], blocks]
    head = jnp.arange(k)[None, :, None]
    token = pages[head, page].astype(jnp.float32)
    position = blocks[..., None] * s + jnp.arange(s, dtype=jnp.int32)
    length = lengths[:, None, None, None]
    seen_mask = listed[..., None] & (position < length)
    if softmax.window is not None:
        seen_mask &= position > length - 1 - softmax.window
    key, value = token[..., :d], token[..., d : 2 * d]
    if kv_scales is not None:
        key, value = (x * kv_scales[head, page, i][..., None] for i, x in enumerate((key, value)))
    # 0 * NaN is NaN: masked values must not be read
    key, value = (jnp.where(seen_mask[..., None], x, 0.0) for x in (key, value))

    scores = jnp.einsum("bkgd,bkmsd->bkgms", grouped, key, precision="highest") * softmax.scale
    scores = jnp.where(seen_mask[:, :, None], softmax.capped(scores), -jnp.inf)

    block_lse = jax.nn.logsumexp(scores, axis=-1)
    total = jax.nn.logsumexp(block_lse, axis=-1)
    if softmax.sink_logits is not None:
        total = jnp.logaddexp(total, softmax.sink_logits.astype(jnp.float32).reshape(k, h // k))
    weights = jnp.where(seen_mask[:, :, None], jnp.exp(scores - total[..., None, None]), 0.0)
    out = jnp.einsum("bkgms,bkmsd->bkgd", weights, value, precision="highest")
    return out.reshape(b, h, d).astype(q.dtype), block_lse.reshape(b, h, m)

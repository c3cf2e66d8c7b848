"""The definition of `paged_prefill`, in plain jax.numpy: for reading, not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from et_jax.softmax import Softmax


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
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t h m"] | None]:
    """Return what `api.paged_prefill` documents, with None for block sums that are not requested."""
    b, t, h, d = q.shape
    k, _, s, e = pages.shape
    n = page_table.shape[1]
    if blocks is None or counts is None:
        blocks = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (b, k, n))
        counts = jnp.full((b, k), n, jnp.int32)
    listed = jnp.arange(blocks.shape[2], dtype=jnp.int32) < counts[..., None]

    def one_query(query, token, block, listed, position):
        """Return attention of one query "h d" at `position` over its sequence's tokens "k n*s e", and block sums."""
        opened = jnp.any((block[..., None] == jnp.arange(n, dtype=jnp.int32)) & listed[..., None], axis=1)
        place = jnp.arange(n * s, dtype=jnp.int32)
        seen_mask = jnp.repeat(opened, s, axis=1) & (place <= position)
        if softmax.window is not None:
            seen_mask &= position - place < softmax.window
        token = jnp.where(seen_mask[..., None], token, 0.0)  # 0 * NaN is NaN: masked values must not be read
        key, value = token[..., :d], token[..., d : 2 * d]
        grouped = query.astype(jnp.float32).reshape(k, h // k, d)
        scores = jnp.einsum("kgd,ktd->kgt", grouped, key, precision="highest") * softmax.scale
        scores = jnp.where(seen_mask[:, None], softmax.capped(scores), -jnp.inf)
        lse = jax.nn.logsumexp(scores.reshape(k, h // k, n, s), axis=-1)
        total = jax.nn.logsumexp(lse, axis=-1)
        if softmax.sink_logits is not None:
            total = jnp.logaddexp(total, softmax.sink_logits.astype(jnp.float32).reshape(k, h // k))
        weights = jnp.where(seen_mask[:, None], jnp.exp(scores - total[..., None]), 0.0)
        out = jnp.einsum("kgt,ktd->kgd", weights, value, precision="highest").reshape(h, d).astype(q.dtype)
        lse = jnp.take_along_axis(lse, jnp.where(listed, block, 0)[:, None], axis=2)
        return out, jnp.where(listed[:, None], lse, -jnp.inf).reshape(h, -1)

    token = pages[:, page_table].astype(jnp.float32)
    if kv_scales is not None:
        key_scale, value_scale = (kv_scales[:, page_table, i, :, None] for i in range(2))
        token *= jnp.where(jnp.arange(e) < d, key_scale, value_scale)
    token = token.swapaxes(0, 1).reshape(b, k, n * s, e)
    position = starts[:, None] + jnp.arange(t, dtype=jnp.int32)
    each_query = jax.vmap(one_query, in_axes=(0, None, None, None, 0))
    out, lse = jax.vmap(each_query)(q, token, blocks, listed, position)
    return out, lse if block_lse else None

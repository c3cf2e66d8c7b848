"""The definitions of `block_scores` and `code_scores`, in plain jax.numpy: for reading, not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from et_jax.softmax import capped


def block_scores(
    q: Float[Array, "b h d"],
    key_box: Float[Array, "k p e"],
    mean: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.block_scores` documents."""
    b, h, d = q.shape
    k, n = key_box.shape[0], page_table.shape[1]
    query = q.astype(jnp.float32).reshape(b, k, h // k, 1, d) * scale
    box = _of_blocks(key_box, page_table).astype(jnp.float32)
    middle = _of_blocks(mean, page_table)[..., :d]
    at_min, at_max = query * box[..., :d], query * box[..., d : 2 * d]
    valid_mask = jnp.arange(n, dtype=jnp.int32) * page_size < lengths[:, None]

    def summed(each: Float[Array, "b k g n d"]) -> Float[Array, "b h n"]:
        return jnp.where(valid_mask[:, None], jnp.sum(each, axis=-1).reshape(b, h, n), -jnp.inf)

    return summed(jnp.minimum(at_min, at_max)), summed(jnp.maximum(at_min, at_max)), summed(query * middle)


def code_scores(
    q: Float[Array, "b h d"],
    key_codes: Int8[Array, "k p r w"],
    key_box: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.code_scores` documents."""
    b, h, d = q.shape
    k, n, s = key_box.shape[0], page_table.shape[1], page_size
    query = q.astype(jnp.float32).reshape(b, k, h // k, d) * scale
    box = _of_blocks(key_box, page_table).astype(jnp.float32)[:, :, 0]
    codes = _of_blocks(key_codes, page_table).astype(jnp.float32).reshape(b, k, n, s, d)
    step = (box[..., d : 2 * d] - box[..., :d]) / 255.0
    offset = box[..., :d] + 128.0 * step
    key = codes * step[..., None, :] + offset[..., None, :]

    # every token's score, and whether it is below the length
    scores = capped(jnp.einsum("bkgd,bknsd->bkgns", query, key, precision="highest"), soft_cap)
    position = jnp.arange(n * s, dtype=jnp.int32).reshape(n, s)
    seen_mask = position < lengths[:, None, None]
    seen = seen_mask[:, None, None]
    block_lse = jax.nn.logsumexp(jnp.where(seen, scores, -jnp.inf), axis=-1)
    mean = jnp.sum(jnp.where(seen, scores, 0.0), axis=-1) / jnp.maximum(jnp.sum(seen, axis=-1, dtype=jnp.float32), 1.0)
    error = jnp.einsum("bkgd,bknd->bkgn", jnp.abs(query), step / 2, precision="highest")
    error = jnp.where(seen_mask[:, None, None, :, 0], error, 0.0)
    return block_lse.reshape(b, h, n), error.reshape(b, h, n), mean.reshape(b, h, n)


def _of_blocks(summary: Array, page_table: Int[Array, "b n"]) -> Array:
    """Return "b k 1 n *e": the summary "k p *e" of every block."""
    return summary[:, page_table].swapaxes(0, 1)[:, :, None]

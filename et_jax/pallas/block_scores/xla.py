"""`block_scores` and `code_scores` without Pallas: whole summary rows gathered once, then batched products."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from et_jax.softmax import capped
from et_jax.sums import log_sum_exp


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
    query = q.astype(jnp.float32).reshape(b * k, h // k, d) * scale
    up, down = jnp.maximum(query, 0.0), jnp.minimum(query, 0.0)
    # a box is its least key beside its greatest: a positive channel takes the least for the low end, a negative one
    # the greatest
    ends = jnp.concatenate([jnp.concatenate([up, down], axis=-1), jnp.concatenate([down, up], axis=-1)], axis=1)
    box = _rows(key_box, page_table, 2 * d).astype(jnp.float32)
    low, high = jnp.split(_products(ends, box), 2, axis=1)
    middle = _products(query, _rows(mean, page_table, d))
    held_mask = _held(n, lengths, page_size)
    low, high, middle = (jnp.where(held_mask, x.reshape(b, h, n), -jnp.inf) for x in (low, high, middle))
    return low, high, middle


def code_scores(
    q: Float[Array, "b h d"],
    key_codes: Int8[Array, "k p c"],
    key_box: Float[Array, "k p e"],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    *,
    page_size: int,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "b h n"], Float[Array, "b h n"]]:
    """Return what `api.code_scores` documents."""
    b, h, d = q.shape
    k, n, s, g = key_box.shape[0], page_table.shape[1], page_size, h // key_box.shape[0]
    query = q.astype(jnp.float32).reshape(b * k, g, d) * scale
    box = _rows(key_box, page_table, 2 * d).astype(jnp.float32)
    step = (box[..., d:] - box[..., :d]) / 255.0
    offset = _products(query, box[..., :d] + 128.0 * step)
    error = _products(jnp.abs(query), 0.5 * step).reshape(b, h, n)

    # the codes' steps go into the queries, of which there are fewer
    stepped = (query[:, None] * step[:, :, None]).reshape(b * k * n, g, d)
    codes = _rows(key_codes, page_table, s * d).reshape(b * k * n, s, d).astype(jnp.float32)
    scores = _products(stepped, codes).reshape(b, k, n, g, s)
    if soft_cap is not None:
        scores = capped(scores + offset.reshape(b, k, g, n).swapaxes(2, 3)[..., None], soft_cap)
        offset = jnp.zeros_like(offset)
    seen_mask = jnp.arange(n * s, dtype=jnp.int32).reshape(n, s) < lengths[:, None, None]
    block_lse = log_sum_exp(jnp.where(seen_mask[:, None, :, None], scores, -jnp.inf))
    block_lse = block_lse.swapaxes(2, 3).reshape(b, h, n) + offset.reshape(b, h, n)
    held_mask = _held(n, lengths, page_size)
    return jnp.where(held_mask, block_lse, -jnp.inf), jnp.where(held_mask, error, 0.0)


def _rows(summary: Array, page_table: Int[Array, "b n"], width: int) -> Array:
    """Return "b*k n width": the first columns of every block's row of a summary "k p e"."""
    heads = jnp.arange(summary.shape[0], dtype=jnp.int32)[:, None]
    gathered = summary[heads, page_table[:, None]]
    return gathered.reshape(-1, *gathered.shape[2:])[..., :width]


def _products(query: Float[Array, "x g d"], key: Float[Array, "x n d"]) -> Float[Array, "x g n"]:
    return jnp.einsum("xgd,xnd->xgn", query, key, precision=jax.lax.Precision.HIGHEST)


def _held(num_blocks: int, lengths: Int[Array, " b"], page_size: int) -> Bool[Array, "b 1 n"]:
    """Return which blocks hold a token."""
    return jnp.arange(num_blocks, dtype=jnp.int32) * page_size < lengths[:, None, None]

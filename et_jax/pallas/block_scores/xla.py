"""`block_scores` and `code_scores` without Pallas: summaries of some blocks are gathered and multiplied per KV head."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8

from et_jax.softmax import capped
from et_jax.sums import total

# Tokens whose boxes, or whose codes, are scored at once. Measured on x86-64 with two cores: boxes of 7,680 tokens take
# 0.6 of the time of pieces of 512; codes are more bytes.
BOX_TOKENS, CODE_TOKENS = 2048, 512


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
    k = key_box.shape[0]
    query = q.astype(jnp.float32).reshape(b * k, h // k, d) * scale
    up, down = jnp.maximum(query, 0.0), jnp.minimum(query, 0.0)
    # a box is its least key beside its greatest: the low end uses the least for a positive query channel, the greatest
    # for a negative one
    ends = jnp.concatenate([jnp.concatenate([up, down], axis=-1), jnp.concatenate([down, up], axis=-1)], axis=1)

    def piece(table: Int[Array, "b m"], start: Int[Array, ""]) -> tuple[Float[Array, "b h m"], ...]:
        box = _rows(key_box, table, 2 * d).astype(jnp.float32)
        low, high = jnp.split(_products(ends, box), 2, axis=1)
        middle = _products(query, _rows(mean, table, d))
        valid_mask = _valid(table.shape[1], lengths - start, page_size)
        low, high, middle = (jnp.where(valid_mask, x.reshape(b, h, -1), -jnp.inf) for x in (low, high, middle))
        return low, high, middle

    low, high, middle = _piecewise(piece, BOX_TOKENS, h, (-jnp.inf,) * 3, page_table, lengths, page_size)
    return low, high, middle


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
    k, s = key_box.shape[0], page_size
    g = h // k
    query = q.astype(jnp.float32).reshape(b * k, g, d) * scale

    def piece(table: Int[Array, "b m"], start: Int[Array, ""]) -> tuple[Float[Array, "b h m"], ...]:
        m, left = table.shape[1], lengths - start
        box = _rows(key_box, table, 2 * d).astype(jnp.float32)
        step = (box[..., d:] - box[..., :d]) / 255.0
        offset = box[..., :d] + 128.0 * step
        step, offset = lax.optimization_barrier((step, offset))  # else computed again for every token
        error = _products(jnp.abs(query), 0.5 * step).reshape(b, h, m)

        # one product for all blocks of a head; scaling the queries instead would need a small product for each block
        codes = _rows(key_codes, table, key_codes.shape[3]).reshape(b * k, m, s, d).astype(jnp.float32)
        key = (codes * step[:, :, None] + offset[:, :, None]).reshape(b * k, m * s, d)
        scores = jnp.einsum("xtd,xgd->xtg", lax.optimization_barrier(key), query, precision=lax.Precision.HIGHEST)
        # blocks along the last axis, which vectorises sums over the tokens before it
        scores = lax.optimization_barrier(scores.reshape(b, k, m, s, g).transpose(0, 1, 4, 3, 2)).reshape(b, h, s, m)
        scores = scores if soft_cap is None else capped(scores, soft_cap)
        position = jnp.arange(s, dtype=jnp.int32)[:, None] + s * jnp.arange(m, dtype=jnp.int32)
        seen_mask = (position < left[:, None, None])[:, None]
        block_lse = _log_sum_exp(jnp.where(seen_mask, scores, -jnp.inf))
        count = jnp.clip(left[:, None] - s * jnp.arange(m, dtype=jnp.int32), 1, s)[:, None].astype(jnp.float32)
        mean = total(jnp.where(seen_mask, scores, 0.0), axis=2) / count
        valid_mask = _valid(m, left, page_size)
        absent = zip((block_lse, error, mean), (-jnp.inf, 0.0, 0.0), strict=True)
        return tuple(jnp.where(valid_mask, found, one) for found, one in absent)

    block_lse, error, mean = _piecewise(piece, CODE_TOKENS, h, (-jnp.inf, 0.0, 0.0), page_table, lengths, page_size)
    return block_lse, error, mean


def _log_sum_exp(scores: Float[Array, "b h s m"]) -> Float[Array, "b h m"]:
    """Return `sums.log_sum_exp` over the tokens of blocks.

    Its exponentials are taken in long rows, which XLA vectorises on a CPU: 0.8 ns each instead of 7.
    """
    peak = jnp.max(scores, axis=2)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    b, h, s, m = scores.shape
    shifted = lax.optimization_barrier(scores - peak[:, :, None]).reshape(b * h, s * m)
    weight = lax.optimization_barrier(jnp.exp(shifted)).reshape(scores.shape)
    return jnp.log(total(weight, axis=2)) + peak


def _piecewise(
    piece: Callable[[Int[Array, "b m"], Int[Array, ""]], tuple[Float[Array, "b h m"], ...]],
    piece_tokens: int,
    num_heads: int,
    absent: tuple[float, ...],
    page_table: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    page_size: int,
) -> tuple[Float[Array, "b h n"], ...]:
    """Return the results for all blocks, computed in pieces of `piece_tokens`.

    `piece` receives the pages of some blocks and the position of their first token. The loop ends with the
    longest row, so its cost is that of the cached tokens; the rest is filled with `absent`. Pieces have
    one shape, so a row's numbers do not depend on the lengths of the others.
    """
    b, n = page_table.shape
    m = max(1, min(n, piece_tokens // page_size))
    padding = -n % m
    table = jnp.pad(page_table, ((0, 0), (0, padding)))

    def step(i: Int[Array, ""], found: tuple[Float[Array, "b h n"], ...]) -> tuple[Float[Array, "b h n"], ...]:
        start = i * m
        # the barrier keeps XLA from computing the pages again for every element of the gathers
        pages = lax.optimization_barrier(lax.dynamic_slice_in_dim(table, start, m, axis=1))
        both = zip(found, piece(pages, start * page_size), strict=True)
        return tuple(lax.dynamic_update_slice_in_dim(full, part, start, axis=2) for full, part in both)

    steps = (jnp.max(jnp.minimum(lengths, n * page_size), initial=0) + m * page_size - 1) // (m * page_size)
    empty = tuple(jnp.full((b, num_heads, n + padding), one, jnp.float32) for one in absent)
    return tuple(found[..., :n] for found in lax.fori_loop(0, steps, step, empty))


def _rows(summary: Array, page_table: Int[Array, "b n"], width: int) -> Array:
    """Return "b*k n width": the first columns of every block's rows of a summary "k p *r e"."""
    heads = jnp.arange(summary.shape[0], dtype=jnp.int32)[:, None]
    gathered = summary[heads, page_table[:, None]]
    return gathered.reshape(-1, *gathered.shape[2:])[..., :width]


def _products(query: Float[Array, "x g d"], key: Float[Array, "x n d"]) -> Float[Array, "x g n"]:
    return jnp.einsum("xgd,xnd->xgn", query, key, precision=lax.Precision.HIGHEST)


def _valid(num_blocks: int, lengths: Int[Array, " b"], page_size: int) -> Bool[Array, "b 1 n"]:
    """Return the mask of blocks with at least one token."""
    return jnp.arange(num_blocks, dtype=jnp.int32) * page_size < lengths[:, None, None]

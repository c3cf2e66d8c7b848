"""`paged_prefill` without Pallas: an online softmax over fixed groups of list entries.

Dense attention lists every block, and its loop runs from the first group in a window to the last one that any
query needs. Given lists are walked one after the other, each to its own end, so the work is their sum. Groups begin
at fixed multiples of their size, and a group invisible to a row changes no bit of that row: before its first token
everything stays 0, after its last the old sums are scaled by exactly 1 and exactly 0 is added.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Int8

from et_jax.pallas import tuned
from et_jax.pallas.checks import padded_width, require_counts, wider
from et_jax.pallas.gather import page_rows, token_scales, tokens
from et_jax.pallas.workspace import Workspace
from et_jax.softmax import Softmax, finite
from et_jax.types import replace

# Measured on x86-64 with two cores, chunks of 64 to 512 queries.
GROUP_TOKENS = 256
NEVER = jnp.iinfo(jnp.int32).max  # the position of an unlisted token, beyond every query


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the keys are walked. group: list entries per loop step."""

    group: int

    def __post_init__(self) -> None:
        require_counts(self)


def heuristic(page_size: int) -> Config:
    """Return the walk for a page size in tokens."""
    return Config(group=max(1, GROUP_TOKENS // page_size))


def workspace(*, rows: int, chunk: int, num_heads: int, num_kv_heads: int, head_dim: int, page_size: int) -> Workspace:
    """Return what `api.workspace` documents."""
    span = heuristic(page_size).group * page_size
    gathered = rows * span * num_kv_heads * padded_width(head_dim)
    return Workspace(scores=4 * 2 * rows * chunk * num_heads * span, gathered=4 * gathered)


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
    config: Config | None = None,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t h m"] | None]:
    """Return what `api.paged_prefill` documents, with None for block sums that are not requested."""
    b, t, h, d = q.shape
    k, p, s, _ = pages.shape
    x, g, n = b * k, h // k, page_table.shape[1]
    if blocks is not None and counts is not None and x > 1:
        lists = {"blocks": blocks, "counts": counts, "block_lse": block_lse, "softmax": softmax, "config": config}
        return _list_by_list(q, pages, page_table, starts, **lists, kv_scales=kv_scales)
    if config is None:
        facts = {"page_size": s, "head_dim": d, "queries": h // k, "chunk": t, "dtype": pages.dtype}
        config = tuned.settings(heuristic(s), "paged_prefill/xla", **facts)
    group, window = config.group, softmax.window
    span = group * s
    dtype = wider(q.dtype, pages.dtype)
    query = q.astype(dtype).reshape(b, t, k, g, d).transpose(0, 2, 3, 1, 4).reshape(x, g * t, d)
    position = starts[:, None] + jnp.arange(t, dtype=jnp.int32)
    if blocks is None or counts is None:
        blocks, counts = jnp.arange(n, dtype=jnp.int32), jnp.full((b, k), n, jnp.int32)
        blocks = jnp.broadcast_to(blocks, (b, k, n))
        first = 0 if window is None else jnp.maximum(jnp.min(starts) - window + 1, 0) // span
        last = jnp.minimum((jnp.max(starts) + t + span - 1) // span, -(-n // group))
    else:
        first, last = 0, (jnp.minimum(jnp.max(counts), blocks.shape[2]) + group - 1) // group
    m = blocks.shape[2]
    blocks = jnp.pad(blocks, ((0, 0), (0, 0), (0, -m % group)))
    entry, offset = jnp.arange(group, dtype=jnp.int32), jnp.arange(s, dtype=jnp.int32)

    def listed_tokens(step):
        """Return the pool rows of a group's pages, and the positions of their tokens."""
        ids = lax.dynamic_slice_in_dim(blocks, step * group, group, axis=2)
        listed = step * group + entry < jnp.minimum(counts, m)[..., None]
        place = jnp.where(listed[..., None], ids[..., None] * s + offset, NEVER).reshape(b, k, 1, span)
        return lax.optimization_barrier((page_rows(page_table, jnp.where(listed, ids, 0), p), place))

    def read(rows):
        """Return keys and values of a group, a term "x t" that is NaN for a value that is not finite, and scales "x t".

        A value that some query must not attend to may be anything, and 0 * NaN is NaN: invalid values are read as 0.
        The term is added to the scores, so that queries that do attend to them still return NaN. The scales, of a pool
        in 8 bits, multiply scores and weights, because 8 bits are exact in bfloat16; only scales can be invalid.
        """
        # entire tokens: a gather of some columns makes XLA copy the pool on TPU
        token = tokens(pages, rows, 0, pages.shape[-1]).astype(dtype)
        key, value = token[..., :d], token[..., d : 2 * d]
        if kv_scales is None:
            is_finite = jnp.isfinite(value)
            fault = jnp.where(jnp.all(is_finite, axis=-1), 0.0, jnp.nan)
            return key, jnp.where(is_finite, value, jnp.zeros((), dtype)), fault, None
        key_scale, value_scale = (scale.reshape(x, span) for scale in token_scales(kv_scales, rows))
        is_finite = jnp.isfinite(value_scale)
        fault = jnp.where(is_finite, 0.0, jnp.nan)
        return key, value, fault, (key_scale, jnp.where(is_finite, value_scale, 0.0))

    def step(i, carry):
        maximum, total, mixed, lse = carry
        rows, place = listed_tokens(i)
        key, value, fault, scales = read(rows)
        seen_mask = place <= position[:, None, :, None]
        if window is not None:
            seen_mask &= position[:, None, :, None] - place < window

        scores = jnp.einsum("xqd,xtd->xqt", query, key, preferred_element_type=jnp.float32) * softmax.scale
        if scales is not None:
            scores = scores * scales[0][:, None]
        scores = (softmax.capped(scores) + fault[:, None]).reshape(b, k, g, t, span)
        scores = jnp.where(seen_mask[:, :, None], scores, -jnp.inf).reshape(x, g * t, span)
        if lse is not None:
            lse = lax.dynamic_update_slice_in_dim(lse, _block_lse(scores, group), i * group, axis=2)

        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        decay = jnp.exp(maximum - finite(new_maximum))
        weights = jnp.exp(scores - finite(new_maximum)[..., None])
        total = total * decay + jnp.sum(weights, axis=-1)
        if scales is not None:
            weights = weights * scales[1][:, None]
        update = jnp.einsum("xqt,xtd->xqd", weights.astype(dtype), value, preferred_element_type=jnp.float32)
        return new_maximum, total, mixed * decay[..., None] + update, lse

    # a sink is one more logit without a value: the initial state of the softmax
    if softmax.sink_logits is None:
        maximum = jnp.full((x, g * t), -jnp.inf, jnp.float32)
        total = jnp.zeros((x, g * t), jnp.float32)
    else:
        sinks = jnp.tile(softmax.sink_logits.astype(jnp.float32).reshape(k, g), (b, 1))
        maximum = jnp.repeat(sinks, t, axis=1)
        total = jnp.ones((x, g * t), jnp.float32)
    mixed = jnp.zeros((x, g * t, d), jnp.float32)
    lse = jnp.full((x, g * t, blocks.shape[2]), -jnp.inf, jnp.float32) if block_lse else None
    _, total, mixed, lse = lax.fori_loop(first, last, step, (maximum, total, mixed, lse))

    out = mixed / jnp.where(total == 0.0, 1.0, total)[..., None]

    def by_query(rows):
        return rows.reshape(b, k, g, t, -1).transpose(0, 3, 1, 2, 4).reshape(b, t, h, -1)

    return by_query(out).astype(q.dtype), None if lse is None else by_query(lse[..., :m])


def _list_by_list(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "k p s e"] | Int8[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    starts: Int[Array, " b"],
    *,
    blocks: Int[Array, "b k m"],
    counts: Int[Array, "b k"],
    block_lse: bool,
    softmax: Softmax,
    kv_scales: Float[Array, "k p 2 s"] | None,
    config: Config | None,
) -> tuple[Float[Array, "b t h d"], Float[Array, "b t h m"] | None]:
    """Walk the list of each row and KV head separately, with the pool viewed as that of one head."""
    (b, t, h, d), (k, p, s, e) = q.shape, pages.shape
    g, pool, sinks = h // k, pages.reshape(1, k * p, s, e), softmax.sink_logits
    scales = None if kv_scales is None else kv_scales.reshape(1, k * p, 2, s)

    def one(pair: Int[Array, ""]) -> tuple[Float[Array, "t g d"], Float[Array, "t g m"] | None]:
        row, head = pair // k, pair % k
        out, lse = paged_prefill(
            lax.dynamic_slice(q, (row, 0, head * g, 0), (1, t, g, d)),
            pool,
            page_table[row][None] + head * p,
            starts[row][None],
            blocks=blocks[row, head][None, None],
            counts=counts[row, head][None, None],
            block_lse=block_lse,
            kv_scales=scales,
            softmax=softmax if sinks is None else replace(softmax, sink_logits=sinks.reshape(k, g)[head]),
            config=config,
        )
        return out[0], None if lse is None else lse[0]

    def by_query(x: Float[Array, "x t g y"]) -> Float[Array, "b t h y"]:
        return x.reshape(b, k, t, g, -1).swapaxes(1, 2).reshape(b, t, h, -1)

    out, lse = lax.map(one, jnp.arange(b * k, dtype=jnp.int32))
    return by_query(out), None if lse is None else by_query(lse)


def _block_lse(scores: Float[Array, "x q t"], num_blocks: int) -> Float[Array, "x q m"]:
    """Return the log-sum-exp of each block, relative to its own maximum, so that a small sum is exact too."""
    scores = scores.reshape(*scores.shape[:2], num_blocks, -1)
    maximum = finite(jnp.max(scores, axis=-1))
    return maximum + jnp.log(jnp.sum(jnp.exp(scores - maximum[..., None]), axis=-1))

"""`paged_prefill` without Pallas: an online softmax over fixed groups of key blocks.

The loop runs from the first group a window still reaches to the last one any query needs. Groups begin at
fixed multiples of their size, and one that a row does not see changes no bit of that row: before its
first token everything stays 0, after its last the old sums are scaled by exactly 1 and exactly 0 is added.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from et_jax.pallas.gather import page_rows, tokens

# Measured on x86-64 with two cores, chunks of 64 to 512 queries.
GROUP_TOKENS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the keys are walked. group: blocks a step of the loop reads."""

    group: int


def heuristic(page_size: int) -> Config:
    """Return the walk for a page size in tokens."""
    return Config(group=max(1, GROUP_TOKENS // page_size))


def paged_prefill(
    q: Float[Array, "b t h d"],
    pages: Float[Array, "k p s e"],
    page_table: Int[Array, "b n"],
    starts: Int[Array, " b"],
    *,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sink_logits: Float[Array, " h"] | None = None,
    config: Config | None = None,
) -> Float[Array, "b t h d"]:
    """Return what `api.paged_prefill` documents."""
    b, t, h, d = q.shape
    k, p, s, _ = pages.shape
    x, g, n = b * k, h // k, page_table.shape[1]
    group = (heuristic(s) if config is None else config).group
    span = group * s
    dtype = jnp.promote_types(q.dtype, pages.dtype)
    query = q.astype(dtype).reshape(b, t, k, g, d).transpose(0, 2, 3, 1, 4).reshape(x, g * t, d)
    position = starts[:, None] + jnp.arange(t, dtype=jnp.int32)

    def read(step):
        """Keys and values of a group, and a term "x t" that is NaN for a value that is not finite.

        A value some query must not see may be anything, and 0 * NaN is NaN: it is read as 0. The term,
        added to the scores, keeps the fault from hiding from the queries that do see it.
        """
        blocks = step * group + jnp.arange(group, dtype=jnp.int32)
        rows = page_rows(page_table, jnp.broadcast_to(blocks, (b, k, group)), p)
        rows = lax.optimization_barrier(rows)
        # whole tokens: a gather of some columns makes XLA copy the pool on TPU
        token = tokens(pages, rows, 0, pages.shape[-1]).astype(dtype)
        key, value = token[..., :d], token[..., d : 2 * d]
        finite = jnp.isfinite(value)
        fault = jnp.where(jnp.all(finite, axis=-1), 0.0, jnp.nan)
        return key, jnp.where(finite, value, jnp.zeros((), dtype)), fault

    def step(i, carry):
        maximum, total, mixed = carry
        key, value, fault = read(i)
        place = i * span + jnp.arange(span, dtype=jnp.int32)
        seen_mask = place <= position[..., None]
        if window is not None:
            seen_mask &= position[..., None] - place < window

        scores = jnp.einsum("xqd,xtd->xqt", query, key, preferred_element_type=jnp.float32) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = (scores + fault[:, None]).reshape(b, k, g, t, span)
        scores = jnp.where(seen_mask[:, None, None], scores, -jnp.inf).reshape(x, g * t, span)

        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        finite_maximum = jnp.where(new_maximum == -jnp.inf, 0.0, new_maximum)
        decay = jnp.exp(maximum - finite_maximum)
        weights = jnp.exp(scores - finite_maximum[..., None])
        total = total * decay + jnp.sum(weights, axis=-1)
        update = jnp.einsum("xqt,xtd->xqd", weights.astype(dtype), value, preferred_element_type=jnp.float32)
        return new_maximum, total, mixed * decay[..., None] + update

    # a sink is one more logit that mixes nothing in: the softmax starts from it
    if sink_logits is None:
        maximum = jnp.full((x, g * t), -jnp.inf, jnp.float32)
        total = jnp.zeros((x, g * t), jnp.float32)
    else:
        sinks = jnp.tile(sink_logits.astype(jnp.float32).reshape(k, g), (b, 1))
        maximum = jnp.repeat(sinks, t, axis=1)
        total = jnp.ones((x, g * t), jnp.float32)
    mixed = jnp.zeros((x, g * t, d), jnp.float32)
    first = 0 if window is None else jnp.maximum(jnp.min(starts) - window + 1, 0) // span
    last = jnp.minimum((jnp.max(starts) + t + span - 1) // span, -(-n // group))
    _, total, mixed = lax.fori_loop(first, last, step, (maximum, total, mixed))

    out = mixed / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out.reshape(b, k, g, t, d).transpose(0, 3, 1, 2, 4).reshape(b, t, h, d).astype(q.dtype)

"""What `paged_prefill` means, in plain jax.numpy: for reading, not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


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
) -> Float[Array, "b t h d"]:
    """Return what `api.paged_prefill` documents."""
    b, t, h, d = q.shape
    k, _, s, e = pages.shape
    n = page_table.shape[1]

    def one_query(query, token, position):
        """Attention of one query "h d" at `position` over the tokens "k n*s e" of its sequence."""
        place = jnp.arange(n * s, dtype=jnp.int32)
        seen_mask = place <= position
        if window is not None:
            seen_mask &= position - place < window
        token = jnp.where(seen_mask[:, None], token, 0.0)  # 0 * NaN is NaN: what is masked must not be read
        key, value = token[..., :d], token[..., d : 2 * d]
        grouped = query.astype(jnp.float32).reshape(k, h // k, d)
        scores = jnp.einsum("kgd,ktd->kgt", grouped, key, precision="highest") * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(seen_mask, scores, -jnp.inf)
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        if sink_logits is not None:
            total = jnp.logaddexp(total, sink_logits.astype(jnp.float32).reshape(k, h // k, 1))
        weights = jnp.where(seen_mask, jnp.exp(scores - total), 0.0)
        return jnp.einsum("kgt,ktd->kgd", weights, value, precision="highest").reshape(h, d).astype(q.dtype)

    token = pages[:, page_table].swapaxes(0, 1).reshape(b, k, n * s, e).astype(jnp.float32)
    position = starts[:, None] + jnp.arange(t, dtype=jnp.int32)
    return jax.vmap(jax.vmap(one_query, in_axes=(0, None, 0)))(q, token, position)

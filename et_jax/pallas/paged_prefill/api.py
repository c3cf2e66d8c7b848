"""Prefill attention over a paged KV cache: the one door, which checks its arguments and picks a backend."""

import jax
from jaxtyping import Array, Float, Int

from et_jax.pallas.backend import NAMES, kernel, resolve
from et_jax.pallas.checks import require_integers, require_pool, require_shape, require_softmax

BACKENDS = {name: kernel("paged_prefill", name) for name in NAMES}


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
    backend: str | None = None,
) -> Float[Array, "b t h d"]:
    """Return causal attention of t new queries a row, at positions starts .. starts + t - 1.

    With z_ij = scale q_i.k_j, or soft_cap tanh(scale q_i.k_j / soft_cap), over the tokens j <= i and, with
    a window, i - j < window:

        out_i = sum_j exp(z_ij) v_j / (sum_j exp(z_ij) + exp(sink))        in the dtype of q

    pages: as in `paged_attention`; the new tokens' own keys and values are already there. The token at
        position j of row b lies in page page_table[b, j // s].
    sink_logits: one more logit a query head, in the denominator only (gpt-oss, 2025).

    Query head h reads KV head h // (h / k). Softmax and sums run in float32. Queries past the end of the
    real tokens give rows to be ignored; no other row depends on them or on their keys and values.
    """
    b, _, h, _ = q.shape
    require_pool(q, pages, head_axis=2)
    require_shape("page_table", page_table, (b, None), "b n")
    require_shape("starts", starts, (b,), "b")
    require_integers("page_table", page_table)
    require_integers("starts", starts)
    require_softmax(h, scale, soft_cap, window, sink_logits)
    name = resolve(backend, BACKENDS)
    with jax.named_scope(f"paged_prefill/{name}"):
        return BACKENDS[name](
            q, pages, page_table, starts, scale=scale, soft_cap=soft_cap, window=window, sink_logits=sink_logits
        )

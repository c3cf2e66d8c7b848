"""`rotate_store` for NVIDIA GPUs, by Triton: one program per row and KV head, with the head's queries."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int


def rotate_store(
    q: Float[Array, "n h d"],
    k: Float[Array, "n k d"],
    v: Float[Array, "n k d"],
    cosine: Float[Array, "n r"],
    sine: Float[Array, "n r"],
    pages: Float[Array, "k p s e"],
    table: Int[Array, "b m"],
    start: Int[Array, " b"],
    count: Int[Array, " b"],
    turn: Int[Array, "1"],
    *,
    depth: int,
    columns: int,
    interpret: bool = False,
) -> tuple[Float[Array, "n k c d"], Float[Array, "k p s e"]]:
    """Return what `api.rotate_store` documents, for head dims of a power of two.

    `interpret` runs the kernel on a CPU, for tests.
    """
    (n, heads, d), (_, num_pages, size, _) = k.shape, pages.shape
    r, group, padded = cosine.shape[1], q.shape[1] // heads, pl.next_power_of_2(columns)

    def kernel(
        q_ref: Any,
        k_ref: Any,
        v_ref: Any,
        cosine_ref: Any,
        sine_ref: Any,
        _: Any,
        table_ref: Any,
        start_ref: Any,
        count_ref: Any,
        turn_ref: Any,
        query_ref: Any,
        pages_ref: Any,
    ) -> None:
        row, head = pl.program_id(0), pl.program_id(1)
        channel, column = jnp.arange(d)[None], jnp.arange(padded)[:, None]
        is_first, turns = channel < r, channel < 2 * r
        pair = jnp.where(turns, jnp.where(is_first, channel + r, channel - r), channel)
        angle = jnp.where(is_first, channel, channel - r)
        cosine, sine = (triton.load(ref.at[row, angle], mask=turns, other=0.0) for ref in (cosine_ref, sine_ref))
        sine = jnp.where(is_first, -sine, sine)

        def rotated(ref: Any, heads: Any, mask: Any) -> Array:
            x, other = (
                triton.load(ref.at[row, heads, at], mask=mask, other=0.0).astype(pages_ref.dtype)
                for at in (channel, pair)
            )
            found = x.astype(jnp.float32) * cosine + other.astype(jnp.float32) * sine
            return jnp.where(turns, found.astype(x.dtype), x)

        there, stored = (jnp.broadcast_to(column < count, (padded, d)) for count in (group, columns))
        query = rotated(q_ref, head * group + column, there)
        triton.store(query_ref.at[row, head, column, channel], query, mask=stored)

        position = start_ref[row]
        block = jnp.minimum(lax.div(position, size), table_ref.shape[1] - 1)
        page, token = table_ref[row, block] + turn_ref[0] * (num_pages // depth), lax.rem(position, size)
        runs = jnp.broadcast_to(count_ref[row] > 0, channel.shape)
        key = rotated(k_ref, jnp.full_like(column[:1], head), runs)
        value = triton.load(v_ref.at[row, head, channel], mask=runs, other=0.0).astype(pages_ref.dtype)
        triton.store(pages_ref.at[head, page, token, channel], key, mask=runs)
        triton.store(pages_ref.at[head, page, token, d + channel], value, mask=runs)

    query, pages = pl.pallas_call(
        kernel,
        grid=(len(table), heads),
        out_shape=(
            jax.ShapeDtypeStruct((n, heads, columns, d), pages.dtype),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ),
        input_output_aliases={5: 1},
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="rotate_store",
    )(q, k, v, cosine, sine, pages, table, start, count, turn)
    return query, pages

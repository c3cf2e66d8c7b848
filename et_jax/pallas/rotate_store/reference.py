"""The definition of `rotate_store`, in plain jax.numpy: for reading, not for speed."""

import jax.numpy as jnp
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
) -> tuple[Float[Array, "n k c d"], Float[Array, "k p s e"]]:
    """Return what `api.rotate_store` documents."""
    (n, num_heads, d), (heads, num_pages, size, _) = k.shape, pages.shape
    r, group = cosine.shape[1], q.shape[1] // num_heads
    cosine, sine = cosine[:, None], sine[:, None]

    def rotated(x: Float[Array, "n x d"]) -> Float[Array, "n x d"]:
        x = x.astype(pages.dtype)
        first, second = (x[..., at : at + r].astype(jnp.float32) for at in (0, r))
        turned = first * cosine - second * sine, second * cosine + first * sine
        return jnp.concatenate([*(each.astype(x.dtype) for each in turned), x[..., 2 * r :]], axis=-1)

    block = jnp.minimum(start // size, table.shape[1] - 1)
    page = jnp.take_along_axis(table, block[:, None], axis=1)[:, 0] + turn * (num_pages // depth)
    page = jnp.where(count > 0, page, num_pages)
    new = jnp.concatenate([rotated(k), v.astype(pages.dtype)], axis=-1)[: len(table)].swapaxes(0, 1)
    stored = pages.at[jnp.arange(heads)[:, None], page, start % size, : 2 * d].set(new, mode="drop")
    query = rotated(q).reshape(n, heads, group, d)
    return jnp.pad(query, ((0, 0), (0, 0), (0, columns - group), (0, 0))), stored

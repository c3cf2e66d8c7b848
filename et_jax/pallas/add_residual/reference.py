"""The definition of `add_residual`, in plain jax.numpy: for reading, not for speed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def add_residual(
    out: Float[Array, "q h d"],
    read: Float[Array, "b k g"],
    weight: Float[Array, "b k g n"],
    total: Float[Array, "b k g"],
    mean: Float[Array, "k p e"],
    table: Int[Array, "b n"],
    *,
    turn: Int[Array, "1"] | None = None,
    depth: int = 1,
) -> Float[Array, "q h d"]:
    """Return what `api.add_residual` documents."""
    d = out.shape[-1]
    table = table if turn is None else table + turn * (mean.shape[1] // depth)
    value = mean[:, table, d : 2 * d].swapaxes(0, 1)
    value = jnp.where(jnp.any(weight > 0, axis=2)[..., None], value, 0.0)  # 0 * NaN is NaN
    added = jnp.einsum("bkgn,bknd->bkgd", weight, value, precision=jax.lax.Precision.HIGHEST)
    attended = out[: len(read)].astype(jnp.float32).reshape(added.shape)
    found = (read[..., None] * attended + added) / jnp.where(total > 0, total, 1.0)[..., None]
    return jnp.zeros_like(out).at[: len(read)].set(found.astype(out.dtype).reshape(len(read), *out.shape[1:]))

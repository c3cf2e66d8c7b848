"""The residual stream after an addition, and its norm; picks a backend."""

import jax
from jaxtyping import Array, Float, Int

from et_jax.pallas.backend import kernel

BACKENDS = {name: kernel("add_norm", name) for name in ("reference", "gpu")}


def add_norm(
    x: Float[Array, "n w"],
    more: Float[Array, "n w"],
    weights: Float[Array, "l w"],
    layer: Int[Array, ""],
    *,
    eps: float,
    offset: float = 0.0,
    backend: str = "gpu",
) -> tuple[Float[Array, "n w"], Float[Array, "n w"]]:
    """Return `x` with `more` added, and that after the norm of a layer, both in the dtype of `x`.

        sum = x + more                                          more is first rounded to the dtype of x
        normed = sum / sqrt(mean(sum^2) + eps) * (offset + weights[layer])          computed in float32

    Without the kernel XLA launches the addition, the norm, and a copy of the layer's weights. A row's
    bits depend only on that row.
    """
    with jax.named_scope(f"add_norm/{backend}"):
        return BACKENDS[backend](x, more, weights, layer, eps=eps, offset=offset)

"""Estimates of a block's contribution to the output, E_b = sum_{i in b} alpha_i s(v_i), without reading the block.

s is the surprisal "associated with the value vector", which the paper does not define; each function here is one
interpretation. alpha is attention's own share of mass in the paper; it is unknown before a block is read, and its
estimate (`select.ActiveSet.alpha`) decides whether pruning keeps the answers. Source:
Entropic-Time Inference, section 3.2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.view import BlockView, needing, valid_values
from et_jax.sums import length, total

_PIECE = 32  # blocks per step on a CPU: their intermediate results fit into the processor's cache

Contribution = Callable[[BlockView, Float[Array, "g n"]], Float[Array, "g n"]]
"""E_b for each query head and block, given the estimated share of attention mass of each."""


def mass(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return E_b with surprisal 1: the share."""
    return share


def influence(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return how much the output would change without the block: a_b / (1 - a_b) |v_b - o|, in units of the values.

    Exact if a_b is the block's mass, v_b its own output and o the full output; here a_b is the share, v_b the mean
    value and o the weighted mean of those. Infinite for a block with all the mass.
    """
    return _influence(view, share)[0]


def relative_influence(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return `influence` in units of |o|, the norm of the estimated output: one theta for every layer and model."""
    moved, length = _influence(view, share)
    return moved / jnp.maximum(length, jnp.finfo(jnp.float32).tiny)[:, None]


def _influence(view: BlockView, share: Float[Array, "g n"]) -> tuple[Float[Array, "g n"], Float[Array, " g"]]:
    """Return how much the output would change without each block, and the norm of the output."""
    value = valid_values(view)
    out = jnp.matmul(share, value)

    def distances(value: Float[Array, "m d"], out: Float[Array, "g d"]) -> Float[Array, "g m"]:
        return length(value[None] - out[:, None])

    def by_pieces(
        value: Float[Array, "n d"], out: Float[Array, "g d"], most_blocks: Int[Array, ""]
    ) -> Float[Array, "g n"]:
        """Return distances up to the longest sequence, 0 beyond, so that the cost is that of the valid blocks."""
        m = min(_PIECE, len(value))

        def step(i: Int[Array, ""], apart: Float[Array, "g n"]) -> Float[Array, "g n"]:
            piece = distances(jax.lax.dynamic_slice_in_dim(value, i * m, m), out)
            return jax.lax.dynamic_update_slice_in_dim(apart, piece, i * m, axis=1)  # clamped at the end like the read

        return jax.lax.fori_loop(0, (most_blocks + m - 1) // m, step, jnp.zeros((len(out), len(value))))

    if view.most_blocks is None:
        apart = distances(value, out)
    else:
        apart = jax.lax.platform_dependent(
            value, out, view.most_blocks, cpu=by_pieces, default=lambda value, out, _: distances(value, out)
        )
    rest = 1.0 - share
    moved = jnp.where(rest > 0, share * apart / jnp.where(rest > 0, rest, 1.0), jnp.inf)
    return moved, length(out)


def value_gauss(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return the share times 1/2 sum_c (v_c - mu_c)^2 / s_c^2, in nats: the surprisal of a block's mean value.

    The normal distribution is fitted, per channel, to the mean values of the valid blocks; the variance of values
    within a block is not stored and not included.
    """
    weight = view.num_tokens.astype(jnp.float32)[:, None]
    weight = weight / jnp.maximum(total(weight[:, 0]), 1.0)
    value = valid_values(view)
    apart = value - total(weight * value, 0)
    variance = total(weight * apart * apart, 0)
    ratio = apart * apart / jnp.maximum(variance, jnp.finfo(jnp.float32).tiny)
    return share * (0.5 * total(ratio))


@needing("surprisals")
def token_nll(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return the share times the mean of -log p(x_i | x_<i) of the block's tokens, in nats.

    The cache must store surprisals, and the prompt then passes through the language-model head.
    """
    if view.mean_surprisal is None:
        raise ValueError("token_nll: this view has no surprisals; a selector that reads them declares it by `needing`.")
    return share * view.mean_surprisal

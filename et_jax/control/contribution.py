"""What a block contributes to the output: readings of E_b = sum_{i in b} alpha_i s(v_i), made without reading it.

s is the surprisal "associated with the value vector", which the paper does not define; each function here is one thing
it may stand for. alpha is attention's own share of mass in the paper; what stands for it before a block is read is a
choice of its own (`select.ActiveSet.alpha`), and the one that decides whether pruning keeps the answers. Source:
Entropic-Time Inference, section 3.2.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from et_jax.control.view import BlockView, valid_values, needing
from et_jax.sums import length, total

_PIECE = 32  # blocks looked at together on a CPU: what is worked out of them stays in the processor's cache

Contribution = Callable[[BlockView, Float[Array, "g n"]], Float[Array, "g n"]]
"""E_b for each query head and block, given the share of attention mass that is thought to be in each."""


def mass(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return E_b with surprisal 1: the share itself."""
    return share


def influence(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return how far the output would move without the block: a_b / (1 - a_b) |v_b - o|, in units of the values.

    Exact where a_b is the block's mass, v_b its own output and o the whole output; here the share, the mean value and
    the mean of those. Infinite for a block that holds all the mass.
    """
    return _influence(view, share)[0]


def relative_influence(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return `influence` in units of |o|, the estimated output's length: one theta for every layer and model."""
    moved, length = _influence(view, share)
    return moved / jnp.maximum(length, jnp.finfo(jnp.float32).tiny)[:, None]


def _influence(view: BlockView, share: Float[Array, "g n"]) -> tuple[Float[Array, "g n"], Float[Array, " g"]]:
    """How far the output would move without each block, and its length."""
    value = valid_values(view)
    out = jnp.matmul(share, value)

    def whole(value: Float[Array, "m d"], out: Float[Array, "g d"]) -> Float[Array, "g m"]:
        return length(value[None] - out[:, None])

    def by_pieces(
        value: Float[Array, "n d"], out: Float[Array, "g d"], most_blocks: Int[Array, ""]
    ) -> Float[Array, "g n"]:
        """Up to the longest sequence, and 0 beyond, so that it costs what is held and not what fits."""
        m = min(_PIECE, len(value))

        def step(i: Int[Array, ""], apart: Float[Array, "g n"]) -> Float[Array, "g n"]:
            piece = whole(jax.lax.dynamic_slice_in_dim(value, i * m, m), out)
            return jax.lax.dynamic_update_slice_in_dim(apart, piece, i * m, axis=1)  # past the end both start before it

        return jax.lax.fori_loop(0, (most_blocks + m - 1) // m, step, jnp.zeros((len(out), len(value))))

    if view.most_blocks is None:
        apart = whole(value, out)
    else:
        apart = jax.lax.platform_dependent(
            value, out, view.most_blocks, cpu=by_pieces, default=lambda value, out, _: whole(value, out)
        )
    rest = 1.0 - share
    moved = jnp.where(rest > 0, share * apart / jnp.where(rest > 0, rest, 1.0), jnp.inf)
    return moved, length(out)


def value_gauss(view: BlockView, share: Float[Array, "g n"]) -> Float[Array, "g n"]:
    """Return the share times 1/2 sum_c (v_c - mu_c)^2 / s_c^2, in nats: the surprisal of a block's mean value.

    Under a normal fitted, channel by channel, to the mean values of the blocks held; what values differ
    within a block is not stored and not counted.
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

    The cache must keep surprisals, and the prompt then passes through the language-model head.
    """
    if view.mean_surprisal is None:
        raise ValueError("token_nll: this view has no surprisals; a selector that reads them says so by `needing`.")
    return share * view.mean_surprisal

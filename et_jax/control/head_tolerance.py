"""How much of its attention mass each query head may leave unread: rules that a selector asks before it chooses.

A law sets one tolerance for a sequence and its next token (`control.tolerance`). A rule shares it out among the query
heads of a layer, from what is known of this very token's attention before a value is read.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.control.view import BlockView, attention_entropy, likeliest_log_mass
from et_jax.types import Number, Table, static, value

HeadRule = Callable[[BlockView], Float[Array, " g"]]
"""The tolerance of each query head of a view, from 0 (everything is read)."""


@value
class AttentionEntropy:
    """A head whose attention is spread out may leave more unread, one that looks at a few blocks less.

        eps_h = min(eps e^{slope (h - centre)}, most)

    eps is the sequence's tolerance, h the head's attention entropy over its blocks by their likeliest masses (see
    `view.attention_entropy`). No head passes `most`; slope 0 gives every head eps.
    """

    slope: Number = 5 / 3
    centre: Number = 0.5
    most: Number = 1.0

    def __call__(self, view: BlockView) -> Float[Array, " g"]:
        """Return the tolerance of each query head."""
        entropy = attention_entropy(likeliest_log_mass(view), view.num_tokens > 0)
        scaled = view.tolerance * jnp.exp(self.slope * (entropy - self.centre))
        return jnp.minimum(scaled, self.most)


@value
class Fixed:
    """The sequence's tolerance times a constant of each layer and query head, "l k g", at most `most`."""

    factors: Table = static()
    most: Number = 1.0

    def __call__(self, view: BlockView) -> Float[Array, " g"]:
        """Return the tolerance of each query head."""
        factors = jnp.asarray(self.factors.array, jnp.float32)[view.layer, view.kv_head]
        return jnp.minimum(view.tolerance * factors, self.most)

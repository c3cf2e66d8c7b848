"""How much of its attention mass each query head may leave unread: rules that a selector asks before it chooses.

A law sets one tolerance for a sequence and its next token (`control.tolerance`). A rule shares it out among the query
heads of a layer, from what is known of this very token's attention before a value is read.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.control.view import BlockView, attention_entropy, likeliest_log_mass
from et_jax.types import Number, value

HeadRule = Callable[[BlockView], Float[Array, " g"]]
"""The tolerance of each query head of a view, from 0 (everything is read)."""


@value
class AttentionEntropy:
    """A head whose attention is spread out may leave the whole tolerance unread, one that looks at few blocks less.

        eps_h = eps e^{-slope (1 - h)}

    eps is the sequence's tolerance, h the head's attention entropy over its blocks by their likeliest masses (see
    `view.attention_entropy`), below 1: no head passes eps. Slope 0 gives every head eps. The default is measured
    where unread blocks count as their mean value; where they count as nothing 2 was better (docs/evidence.md).
    """

    slope: Number = 0.8

    def __call__(self, view: BlockView) -> Float[Array, " g"]:
        """Return the tolerance of each query head."""
        entropy = attention_entropy(likeliest_log_mass(view), view.num_tokens > 0)
        return view.tolerance * jnp.exp(self.slope * (entropy - 1.0))

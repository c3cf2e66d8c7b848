"""How much of its attention mass each query head may leave unread: rules that a selector applies first.

A law sets one tolerance for a sequence and its next token (`control.tolerance`). A rule sets one per query
head of a layer, from the current token's estimated attention, before a value is read.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from et_jax.control.view import BlockView, attention_entropy, likeliest_log_mass
from et_jax.types import Number, value

HeadRule = Callable[[BlockView], Float[Array, " g"]]
"""The tolerance of each query head of a view, from 0 (full attention)."""


@value
class AttentionEntropy:
    """A tolerance that shrinks with the entropy of a head's attention.

        eps_h = eps e^{-slope (1 - h)}

    eps is the sequence's tolerance, h the head's attention entropy over its blocks by their estimated masses (see
    `view.attention_entropy`), below 1: no head exceeds eps, and concentrated heads get less. Slope 0 gives every head
    eps. The default was measured with unread blocks as their mean value; without them 2 was better (docs/evidence.md).
    """

    slope: Number = 0.8

    def __call__(self, view: BlockView) -> Float[Array, " g"]:
        """Return the tolerance of each query head."""
        entropy = attention_entropy(likeliest_log_mass(view), view.num_tokens > 0)
        return view.tolerance * jnp.exp(self.slope * (entropy - 1.0))

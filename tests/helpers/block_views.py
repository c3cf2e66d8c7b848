"""The blocks of a KV head's keys and values as a query sees them."""

import numpy as np
from drawn_blocks import seen
from jaxtyping import Array, Float, Int

from et_jax.control.view import BlockView


def blocks_at(
    query: Float[Array, "g d"],
    key: Float[Array, "t d"],
    value: Float[Array, "t d"],
    position: Int[Array, ""],
    page_size: int,
) -> BlockView:
    """Return the blocks that the query at `position` sees, in pages of `page_size` tokens, a divisor of t.

    `query` is scaled, so that query . key is the attention score.
    """
    keys, values = (np.array(x).reshape(-1, page_size, x.shape[-1]) for x in (key, value))
    num_tokens = np.clip(int(position) + 1 - np.arange(len(keys)) * page_size, 0, page_size)
    return seen(np.asarray(query), keys, values, num_tokens, tolerance=0.0).view

"""Which blocks a query may see, and which are read whatever a selector says: by looking at every position."""

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.decode.selection import blocks_of

PAGE, BLOCKS = 4, 6


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7, 24])
def test_blocks_are_those_of_the_positions_that_are_seen(window):
    lengths = np.arange(PAGE * BLOCKS + 1)
    table = jnp.zeros((len(lengths), BLOCKS), jnp.int32)
    blocks = blocks_of(table, jnp.asarray(lengths, jnp.int32), PAGE, window)
    position = np.arange(PAGE * BLOCKS)
    held = position < lengths[:, None]
    seen = held & (position >= lengths[:, None] - (window or len(position)))
    held, seen = (x.reshape(len(lengths), BLOCKS, PAGE) for x in (held, seen))
    newest = (position == lengths[:, None] - 1).reshape(held.shape).any(axis=-1)
    cut = seen.any(axis=-1) & (held & ~seen).any(axis=-1)  # its summary speaks of tokens that are not seen
    np.testing.assert_array_equal(blocks.readable, seen.any(axis=-1))
    np.testing.assert_array_equal(blocks.certain, newest | cut)
    whole = held.sum(axis=-1) * seen.any(axis=-1) * ~cut
    np.testing.assert_array_equal(np.where(blocks.readable, blocks.num_tokens, 0), whole)

"""What blocks contribute, worked out up to the longest of several sequences: the bits of a view looked at alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_views import blocks_at

from et_jax.control.contribution import influence, relative_influence
from et_jax.control.view import mass
from et_jax.types import replace

HELD, BLOCKS, PAGE, GROUP, DIM = 41, 70, 2, 3, 8


@pytest.mark.parametrize("contribution", [influence, relative_influence])
@pytest.mark.parametrize("most_held", [HELD, 64, BLOCKS])
def test_how_long_the_longest_sequence_is_changes_no_contribution(contribution, most_held):
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(BLOCKS * PAGE, DIM)), jnp.float32) for _ in "kv")
    query = jnp.asarray(rng.normal(size=(GROUP, DIM)), jnp.float32)
    view = blocks_at(query, key, value, jnp.int32(HELD * PAGE - 1), PAGE)
    each = jax.jit(lambda view: contribution(view, mass(view)))
    alone, together = each(view), each(replace(view, most_held=jnp.int32(most_held)))
    np.testing.assert_array_equal(together, alone)
    assert np.all(alone[:, :HELD] > 0) and not np.any(alone[:, HELD:])

"""Where the tokens stand in a cache whose queries are kept in a ring."""

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.decode.queries import newest, places


@pytest.mark.parametrize(("length", "shift"), [(5, 0), (8, 0), (23, 0), (23, 9), (64, 40)])
def test_a_query_in_the_ring_is_that_of_the_last_token_written_there(length, shift):
    window, ring = 8, {}
    for token in range(length):
        ring[token % window] = token - shift  # a compressed cache has lost `shift` tokens before it
    found = np.asarray(places(jnp.int32(length), jnp.int32(shift), window))
    assert {at: int(found[at]) for at in ring} == ring
    assert all(found[at] < -shift for at in set(range(window)) - ring.keys())  # nothing was written there


@pytest.mark.parametrize(("length", "shift"), [(12, 0), (23, 9), (64, 40)])
def test_a_draft_that_is_rejected_is_stored_over_none_of_the_last_queries(length, shift):
    window, drafted = 8, 4
    ring = np.full((window + drafted, 1, 1), -1.0, np.float32)
    for token in range(length + drafted):
        ring[token % len(ring)] = token
    found, at = newest(jnp.asarray(ring), jnp.int32(length), jnp.int32(shift), window)
    assert sorted(found[:, 0, 0].tolist()) == [*range(length - window, length)]
    assert (found[:, 0, 0].astype(int) == at + shift).all()
    assert [token % window for token in found[:, 0, 0].tolist()] == [*range(window)]  # as in a ring of no more

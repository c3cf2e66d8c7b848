"""The cut without a sort, against one that tries every cut."""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.bisect import above_threshold, by_halves, by_parts, ordered

# Few distinct values, so that ties are common; signed zeros and -inf are scores too.
SCORES = st.sampled_from([-np.inf, -3e30, -2.5, -1e-40, -0.0, 0.0, 1e-40, 0.5, 0.50000006, 7.0, np.inf])


@jax.jit
def opened_for(score, goal):
    return above_threshold(score, lambda opened: jnp.sum(opened, axis=-1) >= goal)


opened_in_each = jax.jit(jax.vmap(opened_for))


@settings(max_examples=80, deadline=None)
@given(hnp.arrays(np.float32, (3, 2, 9), elements=SCORES), st.tuples(*[st.integers(0, 11)] * 3))
def test_reach_cuts_as_high_as_allowed_with_ties_together(score, goals):
    """In each of three views at once, whose cuts are found after as many halvings as their own scores take."""
    # Numbers too small for float32's normal range count as zero on this device.
    score = np.where((np.abs(score) < 1e-38) & (score != 0), 0.0, score).astype(np.float32)
    together = np.asarray(opened_in_each(jnp.asarray(score), jnp.asarray(goals)))
    for view, goal, opened in zip(score, goals, together, strict=True):
        expected = []
        for row in view:
            allowed = [cut for cut in np.unique(row) if (row >= cut).sum() >= goal]
            expected.append(row >= max(allowed, default=-np.inf))
        np.testing.assert_array_equal(opened, expected)
        np.testing.assert_array_equal(opened_for(jnp.asarray(view), goal), expected)


@settings(max_examples=80, deadline=None)
@given(hnp.arrays(np.float32, (4, 9), elements=st.floats(-(2.0**99), 2.0**99, width=32)), st.integers(0, 11))
def test_both_ways_find_one_cut(score, goal):
    """Of scores of all kinds, in whose patterns every byte matters."""
    score = np.where(np.abs(score) < 1e-37, 0.0, score).astype(np.float32)
    np.testing.assert_array_equal(*(found(ordered(jnp.asarray(score)), goal) for found in ways))


def cut_by(find):
    return jax.jit(lambda keys, goal: find(lambda opened: jnp.sum(opened, axis=-1) >= goal, keys))


ways = [cut_by(find) for find in (by_halves, by_parts)]

"""The cut without a sort, against one that tries every cut."""

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control.bisect import above_threshold, by_halves, by_parts, ordered

# Few distinct values make ties; of the others every byte of the pattern matters.
FEW = st.sampled_from([-np.inf, -3e30, -2.5, -0.0, 0.0, 0.5, 0.50000006, 7.0, np.inf])
SCORES = hnp.arrays(np.float32, (3, 2, 9), elements=FEW | st.floats(-(2.0**99), 2.0**99, width=32))


def reaching(goal):
    return lambda opened: jnp.sum(opened, axis=-1) >= goal


def cut_by(find):
    return jax.jit(jax.vmap(lambda score, goal: ordered(score) >= find(reaching(goal), ordered(score))[:, None]))


WAYS = [
    *(cut_by(find) for find in (by_halves, by_parts)),
    jax.jit(jax.vmap(lambda score, goal: above_threshold(score, reaching(goal)))),
]


@settings(max_examples=80, deadline=None)
@given(SCORES, st.tuples(*[st.integers(0, 11)] * 3))
def test_every_search_cuts_as_high_as_allowed_with_ties_together(score, goals):
    """Of three views at once, each with its own goal."""
    score = np.where(np.abs(score) < 1e-37, 0.0, score).astype(np.float32)  # subnormal numbers count as zero on a CPU
    expected = [
        [row >= max((cut for cut in np.unique(row) if (row >= cut).sum() >= goal), default=-np.inf) for row in view]
        for view, goal in zip(score, goals, strict=True)
    ]
    for opened in WAYS:
        np.testing.assert_array_equal(opened(jnp.asarray(score), jnp.asarray(goals)), expected)

"""Rows walked together or each alone: the fewest steps, and the same result."""

import jax.numpy as jnp
import numpy as np

from et_jax.pallas.apart import apart_or_together


def test_rows_are_walked_in_the_way_that_takes_fewer_steps():
    for lengths, beside in (
        ([5, 0], 1),  # 2.5 x 5 steps alone, 3.5 x 5 together
        ([5, 1], 1),  # 15, 17.5
        ([5, 3], 2),  # 20, 17.5
        ([7] * 3 + [0] * 5, 1),  # 52.5, 66.5
        ([7] * 4 + [0] * 4, 8),  # 70, 66.5
        ([4], 1),
    ):
        x = jnp.arange(float(len(lengths)))
        found, others = apart_or_together(lambda x: (x * x, jnp.full(len(x), len(x))), jnp.array(lengths), x)
        np.testing.assert_array_equal(found, np.square(x))
        assert others.tolist() == [beside] * len(lengths), lengths

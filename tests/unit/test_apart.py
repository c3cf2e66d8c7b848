"""Rows walked together, each alone or in tiles: the fewest steps, and the same result."""

import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.pallas.apart import apart_or_together, in_tiles


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


@pytest.mark.parametrize(
    ("size", "expected"), [(1, [5, 0, 9, 2, 7]), (2, [5, 0, 9, 5, 9]), (3, [9, 2, 9, 2, 9]), (8, [9] * 5)]
)
def test_tiles_contain_rows_of_like_length_and_results_stand_where_their_rows_do(size, expected):
    """Five rows: rows of zeros fill up the tile of the shortest."""
    lengths, x = jnp.array([5, 0, 9, 2, 7]), jnp.arange(10.0).reshape(5, 2)

    def walk(rows):
        x, lengths, _ = rows
        return x * x, jnp.broadcast_to(jnp.max(lengths), (len(lengths),))

    found, longest = in_tiles(walk, size, lengths, (x, lengths, None))
    np.testing.assert_array_equal(found, np.square(x))
    assert longest.tolist() == expected

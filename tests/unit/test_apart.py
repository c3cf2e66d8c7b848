"""Rows walked together or each alone: as many steps as are least, the same found."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from et_jax.pallas.apart import apart_or_together, in_tiles


def squares(rows: tuple[Array, None]) -> tuple[Array, Array]:
    """What is found, and with how many others."""
    x, _ = rows
    return x * x, jnp.full(len(x), len(x))


@pytest.mark.parametrize(
    ("lengths", "beside"),
    [
        ([5, 0], 1),  # 2.5 x 5 steps alone, 3.5 x 5 together
        ([5, 1], 1),  # 15, 17.5
        ([5, 3], 2),  # 20, 17.5
        ([0, 0], 1),
        ([7] * 3 + [0] * 5, 1),  # 52.5, 66.5
        ([7] * 4 + [0] * 4, 8),  # 70, 66.5
        ([9] * 16, 16),
        ([4], 1),
    ],
)
def test_rows_are_walked_in_the_way_that_is_less(lengths, beside):
    x = jnp.arange(float(len(lengths)))
    found, others = apart_or_together(squares, jnp.array(lengths), (x, None))
    np.testing.assert_array_equal(found, np.square(x))
    assert others.tolist() == [beside] * len(lengths)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_tiles_hold_rows_of_like_length_and_find_what_all_together_do(size):
    """Five rows: what is found stands where they do, and rows of zeros fill up the tile of the shortest."""
    lengths, x = jnp.array([5, 0, 9, 2, 7]), jnp.arange(10.0).reshape(5, 2)

    def walk(rows):
        x, lengths, _ = rows
        return x * x, jnp.broadcast_to(jnp.max(lengths), (len(lengths),))

    found, longest = in_tiles(walk, size, lengths, (x, lengths, None))
    np.testing.assert_array_equal(found, np.square(x))
    expected = {1: [5, 0, 9, 2, 7], 2: [5, 0, 9, 5, 9], 3: [9, 2, 9, 2, 9], 5: [9] * 5, 8: [9] * 5}
    assert longest.tolist() == expected[size]

"""Rows walked together or each alone: as many steps as are least, the same found."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from et_jax.pallas.apart import apart_or_together


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

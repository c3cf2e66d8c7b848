"""Float sums in a fixed order, against one number added to another in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.sums import total, total_where


def by_halves(row: np.ndarray) -> np.floating:
    """The sum of a row whose upper half is added to its lower one until one number is left, a power of two apart."""
    left = list(row)
    while len(left) > 1:
        half = 1 << ((len(left) - 1).bit_length() - 1)
        left = [np.float32(x + y) for x, y in zip(left, left[half:], strict=False)] + left[len(left) - half : half]
    return left[0]


@pytest.mark.parametrize("size", [1, 2, 3, 9, 64, 127, 128, 129, 256, 300, 1040, 2047])
def test_a_row_is_summed_by_halves_whatever_stands_beside_or_after_it(size):
    rng = np.random.default_rng(size)
    rows = (rng.normal(size=(5, size)) * np.exp(3 * rng.normal(size=(5, size)))).astype(np.float32)
    mask = rng.uniform(size=rows.shape) < 0.5
    expected = np.asarray([by_halves(row) for row in rows])
    np.testing.assert_array_equal(jax.jit(total)(rows), expected)
    np.testing.assert_array_equal(jax.jit(total)(rows[:1]), expected[:1])
    np.testing.assert_array_equal(jax.jit(lambda x: total(x, 0))(rows.T), expected)
    np.testing.assert_array_equal(jax.jit(total)(np.pad(rows, ((0, 0), (0, 2047 - size)))), expected)
    kept = np.where(mask, rows, np.float32(0))
    np.testing.assert_array_equal(jax.jit(total_where)(rows, mask), [by_halves(row) for row in kept])


def test_long_rows_are_summed_by_the_library():
    rows = np.random.default_rng(0).normal(size=(2, 3000)).astype(np.float32)
    np.testing.assert_allclose(total_where(jnp.asarray(rows), jnp.asarray(rows > 0)), np.maximum(rows, 0).sum(1), 1e-5)

"""Float sums in a fixed order, against one number added to another in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.sums import total, total_where

SIZES = (1, 2, 3, 9, 64, 100, 127, 128, 129, 256, 300, 1040, 2047)


def by_halves(row: np.ndarray) -> np.floating:
    """The sum of a row whose upper half is added to its lower one until one number is left, a power of two apart."""
    left = list(row)
    while len(left) > 1:
        half = 1 << ((len(left) - 1).bit_length() - 1)
        left = [np.float32(x + y) for x, y in zip(left, left[half:], strict=False)] + left[len(left) - half : half]
    return left[0]


def drawn(rows: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(size)
    return (rng.normal(size=(rows, size)) * np.exp(3 * rng.normal(size=(rows, size)))).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_a_row_is_summed_by_halves_whatever_stands_beside_or_after_it(size):
    rows = drawn(5, size)
    expected = np.asarray([by_halves(row) for row in rows])
    np.testing.assert_array_equal(jax.jit(total)(rows), expected)
    np.testing.assert_array_equal(jax.jit(total)(rows[:1]), expected[:1])
    np.testing.assert_array_equal(jax.jit(lambda x: total(x, 0))(rows.T), expected)
    longer = np.pad(rows, ((0, 0), (0, 2047 - size)))
    np.testing.assert_array_equal(jax.jit(total)(longer), expected)


@pytest.mark.parametrize("size", [1, 100, 300, 1040, 3000])
def test_a_mask_keeps_what_is_summed(size):
    rows, mask = drawn(4, size), np.random.default_rng(1).uniform(size=(4, size)) < 0.5
    kept = jax.jit(lambda x, mask: total(jnp.where(mask, x, 0.0)))(rows, mask)
    np.testing.assert_array_equal(jax.jit(total_where)(rows, mask), kept)
    np.testing.assert_allclose(kept, np.where(mask, rows, 0.0).sum(-1, dtype=np.float64), rtol=1e-4, atol=1e-3)

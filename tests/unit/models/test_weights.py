"""A weight as a node: its products and rows by formula, and what it counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.models.weights import Dense, Int8, nodes, num_bytes, num_numbers, rounded, to_int8

NUMBERS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)


def test_a_product_of_bfloat16_is_summed_in_float32():
    weight, x = Dense(array=jnp.asarray(NUMBERS, jnp.bfloat16)), jnp.asarray(ROWS, jnp.bfloat16)
    found = weight.matmul(x)
    assert found.dtype == jnp.float32 and found.shape == (2, 4, 5)
    expected = np.asarray(x, np.float64) @ np.asarray(weight.array, np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # a rounding to bfloat16 is 4e-3


def in_8_bits(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The whole numbers and the scale of each row, by the formula in float64."""
    scales = np.abs(np.asarray(numbers, np.float64)).max(axis=1) / 127
    return np.rint(np.asarray(numbers, np.float64) / np.where(scales == 0, 1.0, scales)[:, None]), scales


@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16])
def test_a_matrix_in_8_bits_is_127ths_of_each_outputs_largest_number(stored):
    """Of more rows than are rounded at a time."""
    rows = np.tile(NUMBERS * np.array([[1.0], [1e-3], [0.0], [1e4], [1.0]], np.float32), (206, 1))
    numbers = np.asarray(rows * np.linspace(0.5, 2, len(rows), dtype=np.float32)[:, None], stored)
    weight = to_int8(numbers, jnp.bfloat16)
    whole, scales = in_8_bits(numbers)
    np.testing.assert_array_equal(weight.array, whole)
    np.testing.assert_allclose(weight.scale, scales, rtol=1e-7)
    assert (weight.shape, weight.dtype) == ((1030, 3), jnp.bfloat16)
    assert weight.array.dtype == np.int8 and weight.scale.dtype == np.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_in_8_bits_is_that_of_whole_numbers_times_both_scales(dtype):
    weight, x = to_int8(NUMBERS, dtype), jnp.asarray(ROWS, dtype)
    found = jax.jit(Int8.matmul)(weight, x)
    assert found.dtype == jnp.float32 and found.shape == (2, 4, 5)
    (inputs, ours), (matrix, theirs) = in_8_bits(np.asarray(x, np.float64).reshape(8, 3)), in_8_bits(NUMBERS)
    expected = (inputs @ matrix.T) * ours[:, None] * theirs
    np.testing.assert_allclose(found.reshape(8, 5), expected, rtol=1e-6)


def test_a_row_in_8_bits_has_the_same_bits_alone_and_among_any():
    weight = to_int8(np.random.default_rng(3).normal(size=(70, 300)).astype(np.float32), jnp.float32)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(1024, 300)), jnp.float32)
    product = jax.jit(Int8.matmul)
    among = np.asarray(product(weight, x))
    for number in (1, 2, 3, 16, 17, 144, 512, 1023):
        assert np.asarray(product(weight, x[:number])).tobytes() == among[:number].tobytes()
        assert np.asarray(product(weight, x[None, :number])).tobytes() == among[:number].tobytes()


def test_sums_that_no_float32_holds_are_exact():
    """Of 130,000 products above 10,000: each sum is far above 2**24, from where float32 lacks whole numbers."""
    draw = np.random.default_rng(6)
    whole, inputs = draw.integers(100, 128, (5, 130_000)), draw.integers(100, 128, (3, 130_000))
    inputs[:, 0] = 127  # so that the scale of each row is 1
    weight = Int8(array=jnp.asarray(whole, jnp.int8), scale=jnp.ones(5), dtype=np.dtype(np.float32))
    found = weight.matmul(jnp.asarray(inputs, jnp.float32))
    np.testing.assert_array_equal(found, (inputs @ whole.T).astype(np.float32))
    with pytest.raises(ValueError, match="wanted at most 132104 for sums of 32 bits"):
        to_int8(np.zeros((1, 132105), np.float32), jnp.float32)


@pytest.mark.parametrize("damage", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 99])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(damage, place):
    """Sought in NumPy: XLA on a CPU may lose a NaN in a maximum."""
    weight = to_int8(np.random.default_rng(5).normal(size=(6, 100)).astype(np.float32), jnp.float32)
    x = np.ones((3, 100), np.float32)
    x[1, place] = damage
    found = np.asarray(jax.jit(Int8.matmul)(weight, jnp.asarray(x)))
    assert np.isfinite(found[[0, 2]]).all() and not np.isfinite(found[1]).any()
    whole, scale = rounded(jnp.asarray(x))
    assert whole.dtype == jnp.int8 and not np.isfinite(scale[1]) and np.isfinite(scale[::2]).all()
    matrix = NUMBERS.copy()
    matrix[4, 2] = damage
    rows = jax.tree.map(jnp.asarray, to_int8(matrix, jnp.float32)).rows(jnp.asarray([4, 0]))
    assert not np.isfinite(rows[0]).all() and np.isfinite(rows[1]).all()


def test_rows_are_those_of_the_ids_in_the_models_dtype_and_a_tree_counts_its_weights():
    ids = np.array([[4, 0], [0, 2]])
    dense, small = Dense(array=jnp.asarray(NUMBERS, jnp.bfloat16)), to_int8(NUMBERS, jnp.bfloat16)
    np.testing.assert_array_equal(dense.rows(jnp.asarray(ids)), dense.array[ids])
    found = jax.tree.map(jnp.asarray, small).rows(jnp.asarray(ids))
    assert found.dtype == jnp.bfloat16
    whole, scales = in_8_bits(NUMBERS)
    np.testing.assert_allclose(np.asarray(found, np.float64), (whole * scales[:, None])[ids], rtol=2**-8)
    tree = {"q": dense, "k": small, "norm": jnp.zeros(3, jnp.float32), "bias": None}
    assert sorted(type(node).__name__ for node in nodes(tree)) == ["ArrayImpl", "Dense", "Int8"]
    assert num_numbers(tree) == 15 + 15 + 3 and num_bytes(tree) == 2 * 15 + (15 + 4 * 5) + 4 * 3

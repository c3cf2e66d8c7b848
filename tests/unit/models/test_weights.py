"""A weight as a node: its products and rows by formula, and what it counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from et_jax.models.weights import Dense, nodes, num_bytes, num_numbers, path_of_weight

NUMBERS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
ROWS = np.random.default_rng(1).normal(size=(2, 4, 3)).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_the_transposed_matrix_in_float32(dtype):
    weight, x = Dense(array=jnp.asarray(NUMBERS, dtype)), jnp.asarray(ROWS, dtype)
    found = weight.matmul(x)
    assert found.dtype == jnp.float32 and found.shape == (2, 4, 5)
    expected = np.asarray(x, np.float64) @ np.asarray(weight.array, np.float64).T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)  # a rounding to bfloat16 is 4e-3


def test_rows_are_those_of_the_ids_in_the_dtype_stored():
    weight = Dense(array=jnp.asarray(NUMBERS, jnp.bfloat16))
    found = weight.rows(jnp.asarray([[4, 0], [0, 2]]))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, weight.array[np.array([[4, 0], [0, 2]])])


def test_a_tree_counts_its_weights_and_what_stands_beside_them():
    weight = Dense(array=jnp.zeros((5, 3), jnp.bfloat16))
    tree = {"q": weight, "norm": jnp.zeros(3, jnp.float32), "bias": None}
    assert (weight.shape, weight.dtype, weight.num_bytes) == ((5, 3), jnp.bfloat16, 30)
    assert sorted(type(node).__name__ for node in nodes(tree)) == ["ArrayImpl", "Dense"]
    assert num_numbers(tree) == 18 and num_bytes(tree) == 30 + 12
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)
    assert num_bytes(shapes) == 4 * 18


def test_the_array_of_a_dense_weight_goes_by_the_weights_name():
    tree = {"q": Dense(array=jnp.zeros((5, 3))), "norm": jnp.zeros(3)}
    named = [jax.tree_util.keystr(path_of_weight(path)) for path, _ in jax.tree.leaves_with_path(tree)]
    assert named == ["['norm']", "['q']"]

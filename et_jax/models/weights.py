"""A weight as a node of a model's tree: what is stored, and the only ways in which a model reads it.

Layers, embedding and head, what a model costs, and its files meet a weight here alone, so that one that is stored in
another form is another class with these properties and methods.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float, Int

from et_jax.types import pytree


@pytree
class Dense:
    """A weight matrix as an array of floats, stored [out, in].

    In training the matrices of all layers are one array, which leads with the layer axis; the matrices of a layer's
    experts are one, [expert, out, in].
    """

    array: Float[Array | np.ndarray, "*l o i"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [out, in]."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the numbers, and of the rows that `rows` returns."""
        return self.array.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads."""
        return math.prod(self.shape) * self.dtype.itemsize

    def matmul(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Return `x @ weight.T`, accumulated in float32 and left in it.

        Stored [out, in], on CPU the same row gives the same bits among 2 to 1024 rows, but for the last outputs of a
        float32 product that has 1 to 8 of them past a multiple of 64.
        """
        return jnp.einsum("...i,oi->...o", x, self.array, preferred_element_type=jnp.float32)

    def one_of(self, number: Int[Array, ""]) -> "Dense":
        """Return one matrix of several."""
        return Dense(array=jax.lax.dynamic_index_in_dim(self.array, number, keepdims=False))

    def matmul_by(self, x: Float[Array, "n i"], counts: Int[Array, " e"]) -> Float[Array, "n o"]:
        """Return `x @ weight.T` by several matrices, the first `counts[0]` rows by the first of them, and so on.

        As `matmul`; 0 in the rows past all of them.
        """
        return jax.lax.ragged_dot_general(x, self.array, counts, _BY_EXPERT, preferred_element_type=jnp.float32)

    def rows(self, ids: Int[Array, "*b"]) -> Float[Array, "*b i"]:
        """Return the rows of these outputs: of an embedding, those of tokens."""
        return self.array[ids]


_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)

Weight = Dense
"""A weight of any kind that a model may hold."""


def nodes(tree: Any) -> list[Any]:
    """Return the weights of a tree, and the arrays that are no part of one, each with `shape` and `dtype`."""
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Weight))


def num_bytes(tree: Any) -> int:
    """Return the bytes that a tree holds: those of its weights, and of the arrays that are no part of one."""
    return sum(
        node.num_bytes if isinstance(node, Weight) else math.prod(node.shape) * node.dtype.itemsize
        for node in nodes(tree)
    )


def num_numbers(tree: Any) -> int:
    """Return how many numbers the weights of a tree stand for, and its other arrays hold."""
    return sum(math.prod(node.shape) for node in nodes(tree))


def path_of_weight(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the path of a leaf; of the array of a dense weight, that of the weight, which it is named by in files."""
    return path[:-1] if path and path[-1] == GetAttrKey("array") else path

"""Weights as nodes of a model's tree: their storage forms, and the operations by which a model uses them.

Layers, embedding, head, the cost model and the file readers use only these properties and methods, so a new storage
form is a new class with the same interface.
"""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from et_jax.sums import total
from et_jax.types import pytree, static

T = TypeVar("T")

QUANTIZED = ("int8",)
"""The storage forms of weights besides floats."""

_MOST = 127  # the symmetric range of int8
_WIDEST = (2**31 - 1) // (_MOST * 128)  # the most inputs of a product whose sum fits 32 bits, with weights of -128
_ROWS = 1024  # of a matrix that are rounded at a time: a float32 copy of a full embedding would fill memory


@pytree
class Dense:
    """A weight matrix as an array of floats, stored [out, in].

    The matrices of stacked layers share an array with a leading layer axis; those of a layer's experts share an array
    [expert, out, in].
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
        """Return `x @ weight.T`, accumulated and returned in float32.

        Stored [out, in], on CPU a row gives the same bits in any batch of 2 to 1024 rows, except for the last outputs
        of a float32 product that has 1 to 8 of them past a multiple of 64.
        """
        return jnp.einsum("...i,oi->...o", x, self.array, preferred_element_type=jnp.float32)

    def one_of(self, *numbers: int | Int[Array, ""]) -> "Dense":
        """Return a matrix of several by its indices along the leading axes; fewer indices return several matrices."""
        return Dense(array=_at(self.array, numbers))

    def matmul_by(self, x: Float[Array, "n i"], counts: Int[Array, " e"]) -> Float[Array, "n o"]:
        """Return `x @ weight.T` by several matrices: the first `counts[0]` rows by the first matrix, and so on.

        Accumulated as in `matmul`; rows past the sum of `counts` are 0.
        """
        return jax.lax.ragged_dot_general(x, self.array, counts, _BY_EXPERT, preferred_element_type=jnp.float32)

    def rows(self, ids: Int[Array, "*b"]) -> Float[Array, "*b i"]:
        """Return the rows of these outputs; for an embedding, those of tokens."""
        return self.array[ids]


@pytree
class Int8:
    """A weight matrix as 8-bit integers, stored [out, in], and a float32 `scale` per output.

    Entry [o, i] has the value `array[o, i] * scale[o]`. `dtype` is that of the result of `rows`, and of the model's
    other arrays.
    """

    array: Int[Array | np.ndarray, "*l o i"]
    scale: Float[Array | np.ndarray, "*l o"]
    dtype: np.dtype = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [out, in]."""
        return self.array.shape

    @property
    def num_bytes(self) -> int:
        """The bytes that a product reads, including the scales."""
        return sum(math.prod(part.shape) * part.dtype.itemsize for part in (self.array, self.scale))

    def matmul(self, x: Float[Array, "*b i"]) -> Float[Array, "*b o"]:
        """Return `x @ weight.T` in float32, with each row of `x` also rounded to 8 bits, with its own scale.

        Products of integers are summed exactly in 32 bits, so a row gives the same bits in any batch. A single row is
        duplicated, because XLA on a CPU has a faster program for two rows.
        """
        whole, scale = rounded(x)
        if alone := math.prod(whole.shape[:-1]) == 1:
            whole = jnp.broadcast_to(whole.reshape(1, -1), (2, whole.shape[-1]))
        sums = jnp.einsum("...i,oi->...o", whole, self.array, preferred_element_type=jnp.int32)
        if alone:
            sums = sums[0].reshape(*x.shape[:-1], -1)
        return sums.astype(jnp.float32) * scale[..., None] * self.scale

    def one_of(self, *numbers: int | Int[Array, ""]) -> "Int8":
        """Return a matrix of several, as `Dense.one_of`."""
        return Int8(array=_at(self.array, numbers), scale=_at(self.scale, numbers), dtype=self.dtype)

    def matmul_by(self, x: Float[Array, "n i"], counts: Int[Array, " e"]) -> Float[Array, "n o"]:
        """Return `x @ weight.T` by several matrices, as `Dense.matmul_by`, in integers as `matmul`."""
        whole, scale = rounded(x)
        sums = jax.lax.ragged_dot_general(whole, self.array, counts, _BY_EXPERT, preferred_element_type=jnp.int32)
        number = jnp.repeat(jnp.arange(len(counts)), counts, total_repeat_length=len(x))
        return sums.astype(jnp.float32) * scale[:, None] * self.scale[number]

    def rows(self, ids: Int[Array, "*b"]) -> Float[Array, "*b i"]:
        """Return the rows of these outputs in `dtype`; for an embedding, those of tokens."""
        return (self.array[ids].astype(jnp.float32) * self.scale[ids][..., None]).astype(self.dtype)


@pytree
class Adapted:
    """A weight matrix [out, in] with several unmerged adapters; each sequence selects an adapter.

    Adapter n adds `b[n]` @ `a[n]`, float32 and scaled; number 0 adds nothing. `number` has the adapter of every row of
    a product; None means 0. With stacked layers all arrays have a leading layer axis.
    """

    base: Dense | Int8
    a: Float[Array | np.ndarray, "*l n r i"]
    b: Float[Array | np.ndarray, "*l n o r"]
    number: Int[Array, "*l b"] | None = None

    @property
    def array(self) -> Shaped[Array | np.ndarray, "*l o i"]:
        """The stored matrix without adapters."""
        return self.base.array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix, [out, in]."""
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the matrix without adapters."""
        return self.base.dtype

    @property
    def num_bytes(self) -> int:
        """The most bytes that a product reads: the matrix, and all adapters."""
        return self.base.num_bytes + sum(math.prod(part.shape) * part.dtype.itemsize for part in (self.a, self.b))

    def of_rows(self, number: Int[Array, " b"]) -> "Adapted":
        """Return the weight for rows with these adapters."""
        lead = self.a.shape[:-3]
        return Adapted(base=self.base, a=self.a, b=self.b, number=jnp.broadcast_to(number, (*lead, *number.shape)))

    def matmul(self, x: Float[Array, "b t i"]) -> Float[Array, "b t o"]:
        """Return `x @ weight.T` in float32 plus each row's adapter term, which `sums.total` sums."""
        found = self.base.matmul(x)
        if self.number is None:
            return found
        a, b = (jnp.asarray(each)[self.number][:, None] for each in (self.a, self.b))
        inner = total(x.astype(jnp.float32)[:, :, None] * a)
        return found + total(inner[:, :, None] * b)


def _at(x: Array | np.ndarray, numbers: tuple[int | Int[Array, ""], ...]) -> Array:
    """Return the entries of an array at these indices of its first axes."""
    rest = x.shape[len(numbers) :]
    start = (*numbers, *[0] * len(rest))
    return jax.lax.dynamic_slice(jnp.asarray(x), start, (*[1] * len(numbers), *rest)).reshape(rest)


_BY_EXPERT = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=(0,)
)

Weight = Dense | Int8
"""A weight of any storage form."""

Matrix = Weight | Adapted
"""A weight that may have adapters: of attention, a feed-forward or the head."""


def rounded(x: Float[Array, "*b i"]) -> tuple[Int[Array, "*b i"], Float[Array, "*b"]]:
    """Return each row as integers from -127 to 127, and the float32 scales that convert them back.

    A row with a NaN or an infinity has such a scale.
    """
    x = x.astype(jnp.float32)
    # the maximum of the bits, as integers: on a CPU the maximum of floats may lose a NaN
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32).max(axis=-1)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32) / _MOST
    return jnp.round(x / jnp.where(scale > 0, scale, 1.0)[..., None]).astype(jnp.int8), scale


def to_int8(weight: Float[np.ndarray, "*l o i"], dtype: DTypeLike) -> Int8:
    """Return a matrix, or several, in 8 bits: each output's numbers are rounded to 127ths of the largest magnitude.

    Raises ValueError for rows so long that a product may overflow a sum of 32 bits.
    """
    if weight.shape[-1] > _WIDEST:
        raise ValueError(f"weight: got {weight.shape[-1]} inputs, wanted at most {_WIDEST} for sums of 32 bits")
    outputs = weight.reshape(-1, weight.shape[-1])
    array, scale = np.empty(outputs.shape, np.int8), np.empty(len(outputs), np.float32)
    for begin in range(0, len(outputs), _ROWS):
        part, rows = outputs[begin : begin + _ROWS].astype(np.float32), slice(begin, begin + _ROWS)
        scale[rows] = np.abs(part).max(axis=-1) / np.float32(_MOST)
        with np.errstate(invalid="ignore"):  # rows that are not finite have such a scale
            array[rows] = np.rint(part / np.where(scale[rows] > 0, scale[rows], 1)[:, None])
    shape = weight.shape
    return Int8(array=array.reshape(shape), scale=scale.reshape(shape[:-1]), dtype=np.dtype(dtype))


def with_adapters(tree: T, number: Int[Array, " b"]) -> T:
    """Return weights in which each row of a product uses the adapter of this number."""

    def changed(node: Any) -> Any:
        return node.of_rows(number) if isinstance(node, Adapted) else node

    return jax.tree.map(changed, tree, is_leaf=is_weight)


def quantized(tree: Any, dtype: DTypeLike) -> Any:
    """Return a tree of float weights with its matrices in 8 bits, and its other arrays in `dtype`."""

    def changed(node: Any) -> Any:
        if is_weight(node):
            return jax.device_put(to_int8(np.asarray(node.array), dtype))
        return node.astype(dtype)

    return jax.tree.map(changed, tree, is_leaf=is_weight)


def by_rows(x: Any) -> Sharding | Format:
    """Return the placement of an array whose rows are looked up: on a TPU with a row-major layout.

    On a TPU, XLA stores a matrix column-major if its number of rows is a multiple of 128 and their length is not, and
    then copies all of it to row-major in every step.
    """
    on_tpu = all(device.platform == "tpu" for device in x.sharding.device_set)
    return Format(Layout(major_to_minor=(0, 1)), x.sharding) if on_tpu and x.ndim == 2 else x.sharding


def looked_up(weight: T) -> T:
    """Return a weight on a device with the layout for row lookups (`by_rows`)."""

    def laid(x: Array) -> Array:
        place = by_rows(x)
        return jax.device_put(x, place) if isinstance(place, Format) else x

    return jax.tree.map(laid, weight)


def nodes(tree: Any) -> list[Any]:
    """Return the weights of a tree, and its other arrays, each with `shape` and `dtype`."""
    return jax.tree.leaves(tree, is_leaf=is_weight)


def is_weight(node: Any) -> bool:
    """Return whether a node of a tree is a weight."""
    return isinstance(node, Matrix)


def num_bytes(tree: Any) -> int:
    """Return the bytes of a tree: those of its weights and of its other arrays."""
    return sum(
        node.num_bytes if isinstance(node, Matrix) else math.prod(node.shape) * node.dtype.itemsize
        for node in nodes(tree)
    )


def num_numbers(tree: Any) -> int:
    """Return the number of parameters in a tree's weights and other arrays."""
    return sum(math.prod(node.shape) for node in nodes(tree))


def path_of_weight(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the path of a leaf; for the array of a dense weight, that of the weight, whose name files use."""
    return path[:-1] if path and path[-1] == GetAttrKey("array") else path

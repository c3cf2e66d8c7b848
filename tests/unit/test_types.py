"""The pytree decorator: a frozen dataclass that JAX takes apart and rebuilds around anything."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int, jaxtyped

from et_jax import types
from et_jax.errors import UsageError
from et_jax.types import pytree, replace


@pytree
class Inner:
    count: Int[Array, ""]
    absent: Float[Array, " b"] | None


@pytree
class Outer:
    values: Float[Array, " b"]
    parts: tuple[Inner, ...]
    notes: dict[str, Inner]


def outer() -> Outer:
    inner = Inner(count=jnp.int32(3), absent=None)
    return Outer(
        values=jnp.arange(2.0), parts=(inner, inner), notes={"a": Inner(count=jnp.int32(4), absent=jnp.ones(5))}
    )


def test_leaves_come_in_the_order_of_the_fields_and_none_is_no_leaf():
    leaves = jax.tree.leaves(outer())
    assert [np.shape(leaf) for leaf in leaves] == [(2,), (), (), (), (5,)]
    assert [int(leaf) for leaf in leaves[1:4]] == [3, 3, 4]


def test_flatten_and_unflatten_are_inverse():
    leaves, treedef = jax.tree.flatten(outer())
    again = treedef.unflatten(leaves)
    assert isinstance(again, Outer) and isinstance(again.parts[1], Inner) and again.parts[0].absent is None
    chex.assert_trees_all_equal(again, outer())


def test_paths_name_the_fields():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(outer())]
    assert paths == [".values", ".parts[0].count", ".parts[1].count", ".notes['a'].count", ".notes['a'].absent"]


@pytest.mark.parametrize("leaf", ["text", None, object(), 3, jax.ShapeDtypeStruct((7, 7), jnp.int8)])
def test_unflattening_takes_children_of_any_kind(leaf):
    tree = jax.tree.map(lambda _: leaf, outer())
    assert tree.values is leaf and tree.parts[1].count is leaf
    assert tree.parts[0].absent is None


def test_abstract_evaluation_lowering_and_transformations_rebuild_it():
    def grow(tree: Outer) -> Outer:
        return replace(tree, values=tree.values * 2)

    shapes = jax.eval_shape(grow, outer())
    assert isinstance(shapes, Outer) and shapes.values == jax.ShapeDtypeStruct((2,), jnp.float32)
    compiled = jax.jit(grow).lower(shapes).compile()
    np.testing.assert_array_equal(compiled(outer()).values, [0, 2])
    rows = jax.tree.map(lambda x: jnp.stack([x, x + 1]), outer())
    np.testing.assert_array_equal(jax.vmap(grow)(rows).values, [[0, 2], [2, 4]])


def test_fields_cannot_be_assigned_or_given_by_position():
    with pytest.raises(dataclasses.FrozenInstanceError):
        outer().values = jnp.zeros(2)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError):
        Inner(jnp.int32(1), None)  # pyright: ignore[reportCallIssue]


def test_replace_changes_a_copy_and_knows_the_names():
    old = outer()
    new = replace(old, values=jnp.zeros(2))
    np.testing.assert_array_equal(old.values, [0, 1])
    np.testing.assert_array_equal(new.values, [0, 0])
    assert new.parts is old.parts
    with pytest.raises(TypeError, match="colour"):
        replace(old, colour=1)


def test_shapes_are_checked_on_the_way_in_but_not_when_a_tree_is_rebuilt():
    from beartype import beartype

    @jaxtyped(typechecker=beartype)
    @pytree
    class Checked:
        values: Float[Array, " b"]
        others: Float[Array, " b"]

    good = Checked(values=jnp.zeros(2), others=jnp.ones(2))
    with pytest.raises(Exception, match="others"):
        replace(good, others=jnp.zeros(3))
    assert jax.tree.map(lambda _: "anything", good).others == "anything"


def test_a_usage_error_is_a_value_error_whose_text_is_the_sentence():
    assert issubclass(UsageError, ValueError)
    assert str(UsageError("Give a prompt.")) == "Give a prompt."


def test_a_sentence_stays_on_its_line_whatever_it_quotes():
    assert str(UsageError("a\nb\x1b[2J\u2028\ud800 is bad; mend it.")) == "a\\nb\\x1b[2J\\u2028\\ud800 is bad; mend it."


def test_numbers_are_checked_where_annotations_are_texts_too():
    """As `from __future__ import annotations` makes them."""
    made = type("Late", (), {"__annotations__": {"slope": "Number"}, "__module__": types.__name__})
    late: Any = types.value(made)
    assert type(late(3).slope) is float and late(3) == late(3.0)
    with pytest.raises(ValueError, match="Late: slope is 'much'; it must be a number"):
        late("much")

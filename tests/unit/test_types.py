"""The pytree decorator: a frozen dataclass that JAX takes apart and rebuilds around anything."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

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
    notes = {"a": Inner(count=jnp.int32(4), absent=jnp.ones(5))}
    return Outer(values=jnp.arange(2.0), parts=(inner, inner), notes=notes)


def test_leaves_have_the_paths_of_their_fields_none_is_no_leaf_and_a_tree_is_rebuilt_around_anything():
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(outer())]
    assert paths == [".values", ".parts[0].count", ".parts[1].count", ".notes['a'].count", ".notes['a'].absent"]
    for leaf in ("text", None, 3, jax.ShapeDtypeStruct((7, 7), jnp.int8)):
        tree = jax.tree.map(lambda _, leaf=leaf: leaf, outer())
        assert tree.values is leaf and tree.parts[1].count is leaf and tree.parts[0].absent is None


def test_fields_change_by_replace_which_checks_names():
    old = outer()
    new = replace(old, values=jnp.zeros(2))
    np.testing.assert_array_equal([old.values, new.values], [[0, 1], [0, 0]])
    assert new.parts is old.parts
    with pytest.raises(TypeError, match="colour"):
        replace(old, colour=1)


def test_a_usage_error_is_a_value_error_whose_sentence_stays_on_its_line():
    assert issubclass(UsageError, ValueError)
    assert str(UsageError("a\nb\x1b[2J\u2028\ud800 is bad; mend it.")) == "a\\nb\\x1b[2J\\u2028\\ud800 is bad; mend it."


def test_numbers_are_checked_where_annotations_are_texts_too():
    """As `from __future__ import annotations` makes them."""
    made = type("Late", (), {"__annotations__": {"slope": "Number"}, "__module__": types.__name__})
    late: Any = types.value(made)
    assert type(late(3).slope) is float and late(3) == late(3.0)
    for wrong in (None, "much", float("nan"), True, 1e39):
        with pytest.raises(ValueError, match=r"Late: slope is .*; it must be a number"):
            late(wrong)

"""Sentences of errors and of values stay brief and on their line, and numbers of values are checked."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from et_jax import types
from et_jax.errors import UsageError
from et_jax.io.values import excerpt, shown


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


@given(st.text(), st.integers(1, 80))
def test_an_excerpt_is_the_text_as_far_as_it_goes_on_one_line(text, most):
    said = excerpt(text, most)
    assert said.isprintable()
    if text.isprintable():
        assert said == (text if len(text) <= most else text[:most] + "...")


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers()))
def test_whatever_is_shown_is_brief(value):
    assert len(shown(value)) < 700 and shown(value).isprintable()

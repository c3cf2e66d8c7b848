"""Sentences of errors stay on their line, and numbers of values are checked."""

from typing import Any

import pytest

from et_jax import types
from et_jax.errors import UsageError


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

"""JSON that says one thing only, and values in a sentence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from et_jax.batch.strict import MAX_DEPTH, MAX_DIGITS, parse, shown

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES, st.text())
def test_what_python_writes_is_read_and_what_is_shown_moves_no_cursor(value, text):
    assert parse(json.dumps(value)) == value
    assert shown(text).isprintable()


def test_the_limits():
    assert parse("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert parse("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH)
    for text in ("9" * (MAX_DIGITS + 1), "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)):
        with pytest.raises(ValueError, match=r"digits|deep"):
            parse(text)
    assert len(parse(json.dumps([{"a": [{}]}] * 1000))) == 1000

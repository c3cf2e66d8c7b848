"""JSON is read up to a limit of digits and of depth."""

import json

import pytest

from et_jax.batch.strict import MAX_DEPTH, MAX_DIGITS, parse


def test_the_limits():
    assert parse("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert parse("[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH)
    for text in ("9" * (MAX_DIGITS + 1), "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1)):
        with pytest.raises(ValueError, match=r"digits|deep"):
            parse(text)
    assert len(parse(json.dumps([{"a": [{}]}] * 1000))) == 1000

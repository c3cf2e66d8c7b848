"""Values as a sentence shows them: brief, on one line, whatever they are."""

import array
import collections
import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from et_jax.io import values
from et_jax.io.values import excerpt, shown


@given(st.text(), st.integers(1, 80))
def test_an_excerpt_is_the_text_as_far_as_it_goes_on_one_line(text, most):
    said = excerpt(text, most)
    assert said.isprintable()
    if text.isprintable():
        assert said == (text if len(text) <= most else text[:most] + "...")


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.lists(st.integers()))
def test_whatever_is_shown_is_brief(value):
    assert len(shown(value)) < 700 and shown(value).isprintable()


def test_bytes_lists_and_texts_are_what_they_hold_whatever_holds_them():
    text = b"It was"
    held = [text, bytearray(text), memoryview(text), memoryview(text).cast("c"), memoryview(np.frombuffer(text, "u1"))]
    held += [memoryview((ctypes.c_char * 6)(*text)), np.bytes_(text), np.array(text)]
    held += [array.array("b", text), array.array("B", text), array.array("u", "It was")]
    for value in held:
        plain = values.plain(value)
        assert values.is_bytes(plain) and not values.is_list(plain)
    ids = [5, 600]
    for value in (ids, array.array("i", ids), memoryview(array.array("H", ids)), np.array(ids, np.uint16)):
        plain = values.plain(value)
        assert values.is_list(plain) and list(plain) == ids
    for value in (collections.UserString("It was"), np.str_("It was"), np.array("It was")):
        assert values.plain(value) == "It was" and type(values.plain(value)) is str

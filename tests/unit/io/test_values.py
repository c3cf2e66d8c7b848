"""Values as a sentence shows them: brief, on one line, whatever they are."""

from hypothesis import given
from hypothesis import strategies as st

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

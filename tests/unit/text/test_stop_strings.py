"""Stop strings: the shown text does not depend on how it was cut, and nothing shown is ever taken back."""

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from et_jax.text.stop_strings import StopStrings

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3)


def cut_at_first_stop(text, stops):
    """The definition, by trying every end: the first place where a stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces, stops):
    watch = StopStrings(stops)
    shown = [watch.push(piece) for piece in pieces]
    return shown, watch.flush(), watch.found


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(TEXT, max_size=8), STOPS)
@example(["one\n", "\ntwo"], ["\n\n"])
@example(["xa long sto", "p"], ["op", "a long stop"])
def test_the_text_is_cut_at_the_first_stop_string_and_only_what_could_become_one_is_held_back(pieces, stops):
    shown, rest, found = run(pieces, stops)
    assert ("".join(shown) + rest, found) == cut_at_first_stop("".join(pieces), stops)
    assert not rest or any(stop.startswith(rest) for stop in stops)  # no more is held back

"""What choosing blocks costs is measured of selectors that choose."""

import pytest
from scripts_here import script

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_every_contestant_is_timed_and_lists_what_it_should():
    bench = script("bench_selection")
    found = bench.measure(rows=2, length=512, page_size=16, rounds=2)
    listed = found["share_listed"]
    assert set(found["milliseconds"]) == {"contiguous", *listed, "entropy alone", "error alone"}
    assert listed["dense"] == 1.0 and 1 / 8 <= listed["quest"] == listed["choose quest"] < 1 / 4
    assert 0 < listed["choose int8"] <= listed["by entropy"] <= 1.0  # no head passes the tolerance of all
    assert min(found["milliseconds"].values()) > 0

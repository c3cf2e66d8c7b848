"""The figures about temperature laws, by hand."""

import numpy as np
import pytest


@pytest.mark.parametrize(("size", "expected"), [(32_000, 27.89), (128_256, 35.58), (151_936, 36.58)])
def test_the_greatest_varentropy_is_the_published_one(script, size, expected):
    assert script("measure_temperature").greatest_varentropy(size) == pytest.approx(expected, abs=0.01)


def test_distinct_3_grams_by_hand(script):
    tokens = np.array([[1, 2, 3, 1, 2, 3, 1], [1, 2, 3, 4, 5, 6, 7]])
    assert script("measure_temperature").distinct_3_grams(tokens) == pytest.approx((3 / 5 + 1) / 2)


def test_the_adversary_never_makes_anyone_wait_longer_than_the_bound(script):
    laws = script("plot_laws")
    for rate, runnable, served in ((0.1, 5, 1), (0.5, 8, 2), (1.0, 6, 3)):
        seen = int(laws.waits(rate, 2.0, runnable, served, 100).max())
        assert 1 < seen <= laws.priority.waiting_bound(2.0, rate, runnable, served)

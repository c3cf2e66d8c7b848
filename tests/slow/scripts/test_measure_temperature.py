"""The figures about temperature laws, by hand."""

import numpy as np
import pytest
from scripts_here import script


@pytest.mark.parametrize(("size", "expected"), [(32_000, 27.89), (128_256, 35.58), (151_936, 36.58)])
def test_the_greatest_varentropy_is_the_published_one(size, expected):
    assert script("measure_temperature").greatest_varentropy(size) == pytest.approx(expected, abs=0.01)


def test_distinct_3_grams_by_hand():
    tokens = np.array([[1, 2, 3, 1, 2, 3, 1], [1, 2, 3, 4, 5, 6, 7]])
    assert script("measure_temperature").distinct_3_grams(tokens) == pytest.approx((3 / 5 + 1) / 2)

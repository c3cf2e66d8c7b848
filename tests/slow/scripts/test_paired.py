"""Budgets that are met, and intervals that hold what they should."""

from types import SimpleNamespace

import numpy as np
import pytest

from scripts.measuring.experiment import Missed
from scripts.measuring.paired import at_budget, interval, matched, saving


@pytest.mark.parametrize("near", [None, 0.5, 0.97, 1.1, 1e-9, 1e9])
@pytest.mark.parametrize("wanted", [0.9, 0.5, 0.1])
def test_a_budget_is_met_to_a_thousandth(wanted, near):
    """Of a curve whose inverse is known, from nowhere or from a start so many times the answer."""
    asked = []

    def run(setting: float) -> tuple[float, str]:
        asked.append(setting)
        return 1.0 / (1.0 + setting**0.5), f"at {setting}"

    answer = (1 / wanted - 1) ** 2
    start = None if near is None else min(max(near * answer, 1e-7), 1e3)
    setting, result = matched(run, wanted, 1e-7, 1e3, start=start)
    assert setting == pytest.approx(answer, rel=0.03) and result == f"at {setting}"
    assert abs(1.0 / (1.0 + setting**0.5) - wanted) <= 1e-3 * wanted
    assert len(asked) < (6 if near in (0.97, 1.1) else 30)


def test_a_budget_that_no_setting_spends_is_told_with_the_nearest():
    with pytest.raises(Missed, match=r"no setting from 1e-07 to 1000 spends 0.5000; the nearest is 0.6000"):
        matched(lambda setting: (0.6 if setting < 1 else 0.2, None), 0.5, 1e-7, 1e3)
    setting, spent = matched(lambda one: (0.6 if one < 1 else 0.2,) * 2, 0.5, 1e-7, 1e3, or_nearest=True)
    assert setting < 1 and spent == 0.6


def test_an_interval_of_a_mean_is_as_wide_as_its_error():
    """Of 60 rows, 1.96 standard errors to either side; of equal rows, nothing."""
    rows = np.random.default_rng(0).normal(5.0, 2.0, size=60)
    low, high = interval(rows)
    half = 1.96 * rows.std() / 60**0.5
    assert (low, high) == pytest.approx((rows.mean() - half, rows.mean() + half), abs=0.05 * half)
    assert interval(np.full(7, 3.0)) == (3.0, 3.0)


def test_an_arm_at_a_budget_gives_what_it_gave_on_all_rows():
    """The search begins on few rows, of which the answer is another."""

    def run(setting: float, few: bool) -> SimpleNamespace:
        return SimpleNamespace(share=np.full(2 if few else 4, 1 / (1 + setting * (3 if few else 1))))

    setting, found = at_budget(run, "share", 0.25, 1e-6, 1e6, within=0.01)
    assert setting == pytest.approx(3.0, rel=0.02) and len(found.share) == 4


def test_a_saving_and_its_interval_are_of_sums():
    """Rows of which half lose all of little, and half nothing of much: no share of rows but of what is lost."""
    baseline = np.tile([1.0, 1000.0], 50)
    arm = np.tile([0.0, 1000.0], 50)
    found = saving(arm, baseline)
    assert found["low"] <= found["share"] <= found["high"] < 0.01
    assert found["share"] == pytest.approx(1 / 1001)

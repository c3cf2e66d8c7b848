"""Answers compared with dense's: the sign test, and tolerances of each kind in the presets' other settings."""

import jax
import pytest
from scripts_here import script

from et_jax.control.presets import preset


@pytest.mark.parametrize(
    ("dense", "found", "chance"),
    [
        ([True] * 5, [False] * 5, 1 / 32),
        ([True] * 5, [True] * 5, 1.0),
        ([False] * 3, [True] * 3, 1.0),
        ([True, True, False, True], [False, False, True, True], 0.5),  # two of three: 4 of 8 ways
    ],
)
def test_the_chance_of_as_many_losses_is_a_coins(dense, found, chance):
    assert script("measure_free_running").p_of_losses(dense, found) == chance


def test_each_kind_of_tolerance_is_searched_and_stands_in_a_preset():
    free = script("measure_free_running")
    controls = free.controls(0.5)
    assert set(controls) == set(free.STARTS)
    assert controls["attention entropy"] == preset("certified", tolerance=0.5)
    assert controls["expected error"] == preset("adaptive", tolerance=0.5)
    plain = jax.tree.structure(controls["constant"])
    assert plain not in {jax.tree.structure(controls[name]) for name in ("attention entropy", "expected error")}
    assert free.controls(30.0)["constant"].law == free.controls(1.0)["constant"].law  # no share of mass is above 1

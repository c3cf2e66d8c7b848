"""Tolerances of each kind in the presets' other settings."""

import jax
from scripts_here import script

from et_jax.control.presets import preset


def test_each_kind_of_tolerance_is_searched_and_stands_in_a_preset():
    free = script("measure_free_running")
    controls = free.controls(0.5)
    assert set(controls) == set(free.STARTS)
    assert controls["attention entropy"] == preset("certified", tolerance=0.5)
    assert controls["expected error"] == preset("adaptive", tolerance=0.5)
    plain = jax.tree.structure(controls["constant"])
    assert plain not in {jax.tree.structure(controls[name]) for name in ("attention entropy", "expected error")}
    assert free.controls(30.0)["constant"].law == free.controls(1.0)["constant"].law  # no share of mass is above 1

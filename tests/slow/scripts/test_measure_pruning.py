"""Ways of pruning differ in what stands for alpha, and in the law of theta, alone."""

from scripts_here import script

from et_jax.control import select, view
from et_jax.control.presets import preset
from et_jax.types import replace


def test_presets_stand_among_what_is_compared_and_differ_from_it_in_alpha():
    controls = script("measure_pruning").controls()
    assert len(controls) == 10 and len(set(controls.values())) == 10
    for name in ("paper", "guarded"):
        served = preset(name)
        assert controls[f"{name}, the greater of last masses and boxes"] == served
        assert isinstance(served.selector, select.Guarded)
        active = served.selector.selector
        by_codes = replace(active, alpha=view.coded_mass, look_every=None)
        expected = replace(served, selector=replace(served.selector, selector=by_codes))
        assert controls[f"{name}, 8-bit keys"] == expected
    one = controls["constant, 8-bit keys"]
    assert replace(one, law=preset("paper").law) == controls["paper, 8-bit keys"] != one

"""A preset that is named chooses blocks from the length on at which that pays; one that is given as a value, always."""

import jax
import pytest

from et_jax.control.controller import Controller
from et_jax.control.presets import PRESETS, preset
from et_jax.errors import UsageError
from et_jax.io.knobs import knobs
from et_jax.serve.config import EngineConfig, controller
from et_jax.serve.loading.min_context import MEASURED, NEVER, named, usual

CHOOSING = [name for name, one in PRESETS.items() if "min_context" in knobs(one)]


def test_every_preset_that_chooses_is_measured_on_a_cpu_and_no_other_is():
    assert sorted(MEASURED["cpu"]) == sorted(CHOOSING) == ["adaptive", "certified", "guarded", "paper"]
    assert all(0 < least <= NEVER for least in MEASURED["cpu"].values())


@pytest.mark.parametrize("name", CHOOSING)
def test_a_named_preset_has_what_was_measured_unless_it_is_told(name):
    assert named(name, "cpu", tolerance=0.5) == preset(name, tolerance=0.5, min_context=MEASURED["cpu"][name])
    assert named(name, "cpu", min_context=None).min_context == MEASURED["cpu"][name]
    assert named(name, "cpu", min_context=0) == preset(name)
    assert named(name, "cpu", min_context=7).min_context == 7
    assert jax.tree.structure(named(name, "cpu", min_context=0)) == jax.tree.structure(preset(name))


def test_blocks_are_always_chosen_where_nothing_was_measured_and_by_a_preset_that_is_given():
    for platform in ("gpu", "tpu", "unheard-of"):
        assert usual("certified", platform) == 0 and named("certified", platform) == preset("certified")
    given = preset("certified", tolerance=0.1)
    assert controller(given, "cpu") is given and EngineConfig(control=given).laws is given
    assert named("ead", "cpu", tau=0.5) == preset("ead", tau=0.5)
    assert named("off", "cpu") == preset("off") == Controller()
    with pytest.raises(UsageError, match='control is "entropic"; choose one of off, paper'):
        named("entropic", "cpu")

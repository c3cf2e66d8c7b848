"""Numbers of a controller changed by name: of a preset its knobs, of any controller its fields."""

import jax
import pytest

from et_jax.control.controller import Controller
from et_jax.control.presets import PRESETS, Off, preset
from et_jax.control.priority import FCFS
from et_jax.control.settings import adjusted
from et_jax.control.temperature import Thermostat
from et_jax.control.temperature_rules import Newton
from et_jax.errors import UsageError
from et_jax.io.knobs import knobs
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("as_users_have_it")


GIVEN = {"tolerance": 0.02, "min_blocks": 5, "window": 32}


@pytest.mark.parametrize("name", [name for name, one in PRESETS.items() if "tolerance" in knobs(one)])
@pytest.mark.parametrize("heated", [False, True])
def test_a_preset_is_changed_as_if_made_so(name, heated):
    given = GIVEN | ({"target_entropy": 2.5} if heated else {})
    made = preset(name, **given)
    changes = {"tolerance": 0.1} | ({"target_entropy": 1.5} if heated else {})
    changed = adjusted(made, changes)
    assert changed == preset(name, **given | changes) != made
    assert changed.preset == PRESETS[name](**given | changes)
    assert jax.tree.structure(changed) == jax.tree.structure(made)


@pytest.mark.parametrize("name", ["ead", "ead_guarded"])
def test_the_bound_of_a_switch_is_a_number_of_its_preset(name):
    made = preset(name, tau=0.5)
    assert adjusted(made, {"tau": 2.0}) == preset(name, tau=2.0) != made
    with pytest.raises(UsageError, match=f'control "{name}" has no tolerance; it has tau.'):
        adjusted(made, {"tolerance": 0.1})


def test_a_prefill_budget_is_part_of_the_program():
    made = preset("entropyinfer", prefill_budget=512)
    assert adjusted(made, {"prefill_budget": 512}) == made
    with pytest.raises(UsageError, match="prefill_budget, which takes another program than the one loaded"):
        adjusted(made, {"prefill_budget": 256})
    with pytest.raises(UsageError, match=r"prefill_budget is 0\.5; it must be a whole number"):
        adjusted(made, {"prefill_budget": 0.5})


@pytest.mark.parametrize("name", ["paper", "guarded", "certified", "adaptive"])
def test_a_least_context_is_a_number_of_its_preset_unless_it_is_off(name):
    made = preset(name, min_context=512)
    changed = adjusted(made, {"min_context": 64})
    assert (made.min_context, changed.min_context) == (512, 64)
    assert changed.preset == PRESETS[name](**{"min_context": 64})
    assert jax.tree.structure(changed) == jax.tree.structure(made) != jax.tree.structure(preset(name))
    assert jax.tree.structure(preset(name, min_context=0)) == jax.tree.structure(preset(name))
    for one, other in ((made, 0), (preset(name), 64)):
        with pytest.raises(UsageError, match="min_context, which takes another program than the one loaded"):
            adjusted(one, {"min_context": other})


def test_a_least_context_is_a_number_of_any_controller_that_has_one():
    assert adjusted(Controller(min_context=8), {"min_context": 9}) == Controller(min_context=9) != Controller()
    assert Controller(min_context=0) == Controller()
    with pytest.raises(ValueError, match="min_context: got -1, wanted 0"):
        Controller(min_context=-1)


def test_off_has_numbers_of_its_clock_and_no_settings():
    made = preset("off")
    assert made == Controller() and made.preset == Off()
    assert adjusted(made, {"decay": 0.5}) != made == adjusted(made, {})
    with pytest.raises(UsageError, match='control "off" has no tolerance'):
        adjusted(made, {"tolerance": 0.1})


def test_what_is_made_by_hand_or_changed_since_has_the_names_of_its_fields_alone():
    """A knob of a preset would undo what was changed of it."""
    made = replace(preset("guarded", tolerance=0.1), priority=FCFS())
    changed = adjusted(made, {"greatest": 0.2, "window": 8})
    assert changed.priority == FCFS() and repr(changed).count("greatest=0.2") == 1
    with pytest.raises(UsageError, match='control has no number "tolerance" here; it has decay'):
        adjusted(made, {"tolerance": 0.2})
    both = adjusted(preset("guarded"), {"decay": 0.5, "tolerance": 0.1})
    assert both == adjusted(preset("guarded", tolerance=0.1), {"decay": 0.5}) and both.preset is None


def test_every_number_of_a_name_changes_and_what_rests_on_it_is_worked_out_again():
    made = preset("guarded", target_entropy=2.0)
    changed = adjusted(made, {"high": 1.5, "decay": 0.5})
    assert repr(changed).count("high=1.5") == repr(made).count("high=2.0") == 2
    own = adjusted(Controller(temperature_rule=Newton(2.0)), {"low": 0.25}).temperature_rule
    assert isinstance(own, Newton) and own == Newton(2.0, low=0.25)
    assert own.log_low == pytest.approx(-1.3863, abs=1e-4)


@pytest.mark.parametrize(
    ("made", "changes", "sentence"),
    [
        (preset("guarded"), {"warmth": 1.0}, 'control has no number "warmth" here; it has ceiling, cost, decay'),
        (preset("guarded"), {"target_entropy": 1.0}, "target_entropy, which takes another program than the one loaded"),
        (preset("guarded"), {"min_blocks": 2.5}, "min_blocks is 2.5; it must be a whole number."),
        (preset("guarded"), {"min_blocks": 0}, "min_blocks, which takes another program"),
        (preset("certified"), {"tolerance": 1.5}, "tolerance is 1.5; it must be a share of attention, from 0 to 1."),
        (preset("guarded"), {"sinks": 2**40}, "it must be a whole number of 32 bits"),
        (Controller(temperature_rule=Newton(2.0)), {"low": -1.0}, "Newton: low is -1.0; it must be above 0"),
        (Controller(law=lambda signals, state: state), {"gain": 1.0}, 'no number "gain" here; it has none.'),
    ],
)
def test_what_cannot_be_changed_is_told_in_a_sentence(made, changes, sentence):
    with pytest.raises(UsageError) as told:
        adjusted(made, changes)
    assert sentence in str(told.value)


def test_equal_controllers_made_in_line_are_one():
    made = [Controller(law=Thermostat(2.0)) for _ in range(2)]
    assert made[0] == made[1] and len(set(made)) == 1 and made[0] != Controller(law=Thermostat(2.5))

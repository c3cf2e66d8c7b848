"""Controllers: presets and what their laws decide over some tokens, numbers changed by name."""

import jax
import numpy as np
import pytest

from et_jax.control import guards
from et_jax.control.controller import Controller
from et_jax.control.experts import Mass
from et_jax.control.presets import PRESETS, preset
from et_jax.control.priority import FCFS
from et_jax.control.settings import adjusted
from et_jax.control.temperature_rules import Newton
from et_jax.errors import UsageError
from et_jax.io.knobs import knobs
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("as_users_have_it")

PRUNING = ("paper", "guarded", "certified", "adaptive", "share")


@pytest.mark.parametrize("name", PRUNING)
def test_a_target_moves_the_temperature_and_all_but_the_paper_only_cool(signals, state, run, name):
    law = preset(name, target_entropy=2.0).law
    for tempered in (5.0, 0.5):
        seen = signals(tempered_entropy=np.full(40, tempered), tempered_varentropy=50.0)
        after = run(law, state(law, temperature=0.9), seen)
        expected, last = [], 0.9
        for _ in range(40):
            wanted = last * np.exp(-0.05 * (tempered - 2.0))  # by at most 0.1 a token, from 0.1 to 2
            last = np.clip(np.clip(wanted, last - 0.1, last + 0.1), 0.1, 2.0 if name == "paper" else 0.9)
            expected.append(last)
        np.testing.assert_allclose(after.temperature, expected, rtol=1e-5)
        assert {key: float(x[-1]) > 0 for key, x in guards.rates(after).items()} == {
            "temperature_saturation": tempered > 2 or name == "paper",
            "stability": True,
        }
    free = preset(name).law
    after = run(free, state(free, temperature=0.9), signals(tempered_entropy=np.full(3, 5.0)))
    assert np.all(after.temperature == np.float32(0.9)) and not guards.rates(after)


@pytest.mark.parametrize("name", PRUNING)
def test_a_threshold_prunes_only_what_the_entropy_calls_certain(signals, state, run, name):
    """From a floor of 0.1 nats to a reference of 2; it rises by a quarter of the greatest a token, falls at once."""
    law = preset(name, tolerance=0.8).law
    start = state(law)
    found = run(law, start, signals(entropy=np.array([3.0, 0.05, 0.05, 0.05, 0.05, 1.0, 2.5]))).tolerance
    rising = [0.0, 0.0, 0.2, 0.4, 0.6, 0.76, 0.4, 0.0]
    wanted = rising if name in ("paper", "guarded") else [0.8] * 8
    np.testing.assert_allclose([start.tolerance, *found], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("entropic", {}, 'control is "entropic"; choose one of off, paper, guarded, certified, adaptive, share, ead, '),
        ("off", {"prefill_budget": 64}, 'control "off" has no prefill_budget; choose one of entropyinfer to set it.'),
        ("paper", {"target_entropy": 0.0}, "target_entropy is 0.0; it must be above 0 nats."),
        ("certified", {"tolerance": 1.5}, "tolerance is 1.5; it must be a share of attention, from 0 to 1."),
        ("share", {"tolerance": 1.5}, "tolerance is 1.5; it must be a share of the blocks, from 0 to 1."),
        ("adaptive", {"min_context": 2**30}, "min_context is 1073741824; it must be from 0 (off) to 536870912."),
    ],
)
def test_a_knob_that_does_not_fit_is_refused_in_one_sentence(name, knobs, message):
    with pytest.raises(UsageError) as refused:
        preset(name, **knobs)
    assert str(refused.value).startswith(message)


# Numbers changed by name.

GIVEN = {"tolerance": 0.02, "min_blocks": 5, "window": 32, "min_context": 512, "target_entropy": 2.5}
CHANGES = {"tolerance": 0.1, "min_context": 64, "target_entropy": 1.5}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_changed_as_if_made_so_and_runs_in_the_same_program_until_it_is_changed_by_hand(name):
    given, changes = ({k: v for k, v in each.items() if k in knobs(PRESETS[name])} for each in (GIVEN, CHANGES))
    if "tau" in knobs(PRESETS[name]):
        given, changes = {"tau": 0.5}, {"tau": 2.0}
    made = preset(name, **given)
    changed = adjusted(made, changes)
    assert changed == preset(name, **given | changes) and (changed != made) == bool(changes)
    assert changed.preset == PRESETS[name](**given | changes)
    assert jax.tree.structure(changed) == jax.tree.structure(made)
    assert made == made.preset.controller() and replace(made, dense_layers=1).preset is None
    assert jax.tree.structure(made) == jax.tree.structure(jax.tree.map(lambda x: x, made))  # it is no part of the tree


def test_the_numbers_of_the_laws_change_beside_the_knobs_of_a_preset():
    made = preset("off")
    assert made == Controller() and adjusted(made, {"decay": 0.5}) != made == adjusted(made, {})
    both = adjusted(preset("guarded"), {"decay": 0.5, "tolerance": 0.1})
    assert both == adjusted(preset("guarded", tolerance=0.1), {"decay": 0.5}) and both.preset is None
    laws = preset("certified").with_experts(Mass(0.9))
    changed = adjusted(laws, {"share": 0.5, "tolerance": 0.2})
    assert changed.experts == Mass(0.5) and adjusted(laws, {"tolerance": 0.2}).experts == Mass(0.9)
    assert changed.with_experts(None) == preset("certified", tolerance=0.2)


def test_a_controller_made_by_hand_or_changed_since_has_the_names_of_its_fields_alone():
    """A knob of a preset would undo what was changed of it."""
    made = replace(preset("guarded", tolerance=0.1), priority=FCFS())
    changed = adjusted(made, {"greatest": 0.2, "window": 8})
    assert changed.priority == FCFS() and repr(changed).count("greatest=0.2") == 1
    with pytest.raises(UsageError, match='control has no number "tolerance" here; it has decay'):
        adjusted(made, {"tolerance": 0.2})
    assert adjusted(Controller(min_context=8), {"min_context": 9}) == Controller(min_context=9) != Controller()


def test_every_number_of_a_name_changes_and_what_rests_on_it_is_worked_out_again():
    made = preset("guarded", target_entropy=2.0)
    assert repr(adjusted(made, {"high": 1.5})).count("high=1.5") == repr(made).count("high=2.0") == 2
    own = adjusted(Controller(temperature_rule=Newton(2.0)), {"low": 0.25}).temperature_rule
    assert isinstance(own, Newton) and own == Newton(2.0, low=0.25)
    assert own.log_low == pytest.approx(-1.3863, abs=1e-4)


ANOTHER = "which requires another compiled program than the loaded one"


@pytest.mark.parametrize(
    ("made", "changes", "sentence"),
    [
        (preset("entropyinfer", prefill_budget=512), {"prefill_budget": 256}, f"prefill_budget, {ANOTHER}"),
        (preset("paper", min_context=512), {"min_context": 0}, f"min_context, {ANOTHER}"),
        (preset("guarded"), {"target_entropy": 1.0}, f"target_entropy, {ANOTHER}"),
        (preset("guarded"), {"min_blocks": 0}, f"min_blocks, {ANOTHER}"),
        (Controller(temperature_rule=Newton(2.0)), {"low": -1.0}, "Newton: low is -1.0; it must be above 0"),
        (Controller(law=lambda signals, state: state), {"gain": 1.0}, 'no number "gain" here; it has none.'),
    ],
)
def test_a_change_that_does_not_fit_is_refused_in_a_sentence(made, changes, sentence):
    with pytest.raises(UsageError) as refused:
        adjusted(made, changes)
    assert sentence in str(refused.value)

"""Controllers by name: what each keeps, and what is refused."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_model import MODEL, configuration, paged_texts, prompt, run, start, texts, weights

from et_jax.control.controller import Controller
from et_jax.control.presets import NAMES, PRESETS, Adaptive, Certified, preset
from et_jax.decode import decoder as decoding
from et_jax.errors import UsageError
from et_jax.models.calibration import Calibration
from et_jax.models.params import describe
from et_jax.types import Table, replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SENSITIVITY = Table(np.full((MODEL.num_layers, MODEL.num_kv_heads, MODEL.group_size), 0.05, np.float32))
compiled: dict[Any, decoding.Decoder] = {}


def bound(controller: Controller) -> decoding.Decoder:
    """The decoder of a controller, compiled once for all of one structure."""
    structure = jax.tree.structure(controller)
    config = configuration(controller=controller, calibration=Calibration(sensitivity=SENSITIVITY))
    if structure not in compiled:
        compiled[structure] = decoding.decoder(config)
    return replace(compiled[structure], config=config)


PROMPT = prompt(3, 20)  # five blocks, and eight more while 32 tokens are written


def signals_of(name: str, sharpness: float = 1.0, **knobs):
    """What a greedy run observed under a preset; a sharper model is surer of its next token."""
    params = replace(weights(), final_norm=weights().final_norm * jnp.float32(sharpness))
    d = bound(preset(name, **knobs))
    state = start(d, params, d.empty(), 1, PROMPT, temperature=0.0, limit=32)
    return run(d, params, state)[1][1].signals


@pytest.mark.slow
def test_tolerance_zero_reads_everything_and_changes_no_text():
    d = bound(preset("guarded", tolerance=0.0))  # as others do that stand in the table of capabilities
    rows = paged_texts(d, weights(), temperature=0.8)
    assert texts(rows) == texts(paged_texts(bound(Controller()), weights(), temperature=0.8))
    for row in rows.values():
        held = row.signals.pages_held * MODEL.num_layers * MODEL.num_kv_heads
        np.testing.assert_array_equal(row.signals.blocks_read, held)


def test_each_knob_reaches_what_it_is_named_for():
    """A larger minimum or window, or a smaller tolerance, reads more."""
    loose = dict(tolerance=0.9, min_blocks=1, window=8)
    few = signals_of("certified", **loose)
    for change in ({"min_blocks": 14}, {"window": 48}, {"tolerance": 0.01}):
        assert few.blocks_read.sum() < signals_of("certified", **loose | change).blocks_read.sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "guarded"])
def test_a_threshold_prunes_only_what_the_entropy_calls_certain(name):
    """After an entropy above the reference of 2 nats nothing is left out; a surer model leaves out."""
    unsure, sure = (signals_of(name, sharpness, tolerance=5.0, min_blocks=1, window=1) for sharpness in (1.0, 30.0))
    held = unsure.pages_held * MODEL.num_layers * MODEL.num_kv_heads
    assert (unsure.entropy > 2.0).all()
    np.testing.assert_array_equal(unsure.blocks_read, held)
    pruned = sure.blocks_read < held
    assert pruned.any() and not pruned[0]  # before the first token nothing is known
    assert not pruned[1:][sure.entropy[:-1] >= 2.0].any()


def heat(name: str, target: float):
    d = bound(preset(name, target_entropy=target))
    state = start(d, weights(), d.empty(), 1, PROMPT[:5], temperature=0.9, limit=40)
    return run(d, weights(), state)[1][1]


@pytest.mark.slow
def test_a_target_moves_the_temperature_and_guards_only_cool():
    """The entropy of these weights lies near 4 nats: a target of 1 cools, one of 4.5 would heat."""
    for name in ("paper", "adaptive"):
        cooled = heat(name, 1.0)
        assert (np.diff(cooled.temperature[:6]) < 0).all() and cooled.temperature[0] == np.float32(0.9)
        assert np.abs(cooled.signals.tempered_entropy[-8:].mean() - 1.0) < 0.5
        assert set(cooled.guard_rates) == {"temperature_saturation", "stability"}
    assert heat("paper", 4.5).temperature[-1] > 0.9
    assert (heat("adaptive", 4.5).temperature <= np.float32(0.9)).all()


def test_the_paper_preset_takes_its_entropy_from_the_likeliest_tokens():
    """96 tokens and 64 listed: an estimate above the exact entropy, which the interval still holds."""
    rough, exact = signals_of("paper", tolerance=0.0), signals_of("guarded", tolerance=0.0)
    assert (rough.entropy >= exact.entropy - 1e-4).all() and (rough.entropy > exact.entropy + 1e-3).any()
    assert (rough.entropy_low <= exact.entropy + 1e-4).all()
    np.testing.assert_allclose(rough.entropy, rough.entropy_high, atol=5e-4)  # but for what the end allows for rounding


def test_a_small_vocabulary_is_listed_whole():
    small = dataclasses.replace(MODEL, vocab_size=32)
    d = decoding.decoder(configuration(model=small, controller=preset("paper")))
    params = jax.tree.map(lambda spec: jnp.zeros(spec.shape, jnp.float32), describe(small))
    jax.eval_shape(d.step, (params,), jax.eval_shape(d.empty))


def test_the_same_preset_is_one_controller():
    """So that a model compiles once for it, and for all of its numbers."""
    assert preset("guarded", tolerance=0.1) == preset("guarded", tolerance=0.1) != preset("guarded")
    assert jax.tree.structure(preset("guarded", tolerance=0.1)) == jax.tree.structure(preset("guarded"))
    assert isinstance(preset("off"), Controller)


@pytest.mark.parametrize("name", NAMES)
def test_a_controller_knows_the_preset_that_made_it_until_it_is_changed(name):
    made = preset(name)
    assert made.preset == PRESETS[name]() and made == PRESETS[name]().controller() == made.preset.controller()
    assert replace(made, dense_layers=1).preset is None and Controller().preset is None
    assert jax.tree.structure(made) == jax.tree.structure(jax.tree.map(lambda x: x, made))  # it is no part of the tree


def test_a_preset_is_told_by_its_knobs():
    assert vars(preset("certified", tolerance=0.1, window=None).preset) == {
        "target_entropy": None,
        "tolerance": 0.1,
        "min_blocks": 3,
        "window": 64,
        "min_context": 0,
    }
    assert preset("adaptive").preset == Adaptive() != Adaptive(tolerance=0.1) != Certified(tolerance=0.1)
    assert preset("adaptive") != preset("adaptive", tolerance=0.1) == Adaptive(tolerance=0.1).controller()


@pytest.mark.parametrize(
    ("name", "knobs", "message"),
    [
        ("entropic", {}, 'control is "entropic"; choose one of off, paper, guarded, certified, adaptive, ead, '),
        ("ead", {"window": 3}, 'control "ead" has no window; it has tau.'),
        (
            "paper",
            {"tau": 0.1},
            'control "paper" has no tau; it has target_entropy, tolerance, min_blocks, window, min_context.',
        ),
        ("ead_guarded", {"tau": float("nan")}, "tau is nan"),
        ("entropyinfer", {"prefill_budget": 0}, "prefill_budget is 0; it must be from 1 to 536870912."),
        ("off", {"prefill_budget": 64}, 'control "off" has no prefill_budget; choose one of entropyinfer to set it.'),
        ("entropyinfer", {"tau": 0.1}, 'control "entropyinfer" has no tau; it has prefill_budget.'),
        ("certified", {"prefill_budget": 64}, 'control "certified" has no prefill_budget'),
        ("off", {"window": 3}, 'control "off" has no window; choose one of paper, guarded, certified, adaptive to set'),
        ("off", {"warmth": 3}, 'control "off" has no warmth; it has none.'),
        ("paper", {"target_entropy": 0.0}, "target_entropy is 0.0; it must be above 0 nats."),
        ("paper", {"target_entropy": float("nan")}, "target_entropy is nan"),
        ("guarded", {"target_entropy": float("inf")}, "target_entropy is inf; it must be a finite number."),
        ("paper", {"tolerance": float("inf")}, "tolerance is inf; it must be a finite number."),
        ("certified", {"tolerance": 1.5}, "tolerance is 1.5; it must be a share of attention, from 0 to 1."),
        ("guarded", {"tolerance": -0.1}, "tolerance is -0.1; it must be 0 or above."),
        ("guarded", {"min_blocks": -1}, "min_blocks is -1; it must be from 0 (off) to 536870912."),
        ("guarded", {"min_context": -1}, "min_context is -1; it must be from 0 (off) to 536870912."),
        ("adaptive", {"min_context": 2**30}, "min_context is 1073741824; it must be from 0 (off) to 536870912."),
        ("ead", {"min_context": 64}, 'control "ead" has no min_context; it has tau.'),
        ("guarded", {"window": -2}, "window is -2; it must be from 0 (off) to 536870912."),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(name, knobs, message):
    with pytest.raises(UsageError) as caught:
        preset(name, **knobs)
    assert str(caught.value).startswith(message)

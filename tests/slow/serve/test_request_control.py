"""Requests with numbers of their own: one program for all, and each completion as under that controller alone."""

import pytest
from reopened import SENTENCE, SIZES, bits

import et_jax
from et_jax import Controller, GenerationRequest, SamplingParams, UsageError, preset
from et_jax.control.settings import adjusted
from et_jax.control.temperature import Thermostat
from et_jax.serve.programs.compilation import made
from et_jax.types import replace

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PARAMS = SamplingParams(max_tokens=6, seed=5, ignore_eos=True)
GIVEN = {"target_entropy": 2.0, "tolerance": 0.05}


@pytest.fixture(scope="module")
def model():
    return et_jax.load(**SIZES, control=preset("guarded", **GIVEN))


def numbers(i: int) -> dict[str, float]:
    return {"target_entropy": 0.5 + i / 25, "tolerance": i / 1000, "gain": 0.02 + i / 5000, "window": 16 * (i % 4)}


def test_forty_controllers_of_one_batch_run_in_one_program(model):
    model.warm_up()
    before = made().programs
    asked = [GenerationRequest(prompt=SENTENCE * 2, params=PARAMS, control=numbers(i)) for i in range(40)]
    other = preset("guarded", target_entropy=1.0, tolerance=0.01)
    by_value = GenerationRequest(prompt=SENTENCE * 2, params=PARAMS, control=other)
    by_name = GenerationRequest(prompt=SENTENCE * 2, params=PARAMS, control={"target_entropy": 1, "tolerance": 0.01})
    *together, one, two = model.generate([*asked, by_value, by_name])
    assert bits(one) == bits(two)
    assert made().programs == before and model.metrics.programs_compiled_late == 0
    assert len({tuple(row.temperature for row in done.trace) for done in together}) > 36  # the numbers matter
    for i in (0, 13, 39):
        given = numbers(i)
        laws = preset("guarded", **{name: given[name] for name in ("target_entropy", "tolerance", "window")})
        [alone] = model.generate([SENTENCE * 2], PARAMS, control=adjusted(laws, {"gain": given["gain"]}))
        assert bits(alone) == bits(together[i])
    assert made().programs == before


def test_what_a_request_cannot_set_is_refused_alone(model):
    for control, sentence in (
        (Controller(law=Thermostat(2.0)), "control is a controller of another structure than the one that serves"),
        ({"warmth": 1.0}, 'control has no number "warmth" here'),
        ({"tolerance": "much"}, 'control.tolerance is "much"; it must be a number.'),
        ({"tolerance": float("nan")}, "control.tolerance is nan; it must be a finite number."),
    ):
        with pytest.raises(UsageError, match=sentence):
            model.generate([GenerationRequest(prompt=SENTENCE * 2, params=PARAMS, control=control)])


def test_controllers_made_in_a_loop_compile_once_and_few_decoders_are_kept(model):
    def laws(i: int) -> Controller:
        return Controller(law=Thermostat(1.0 + i))

    decoders = [model.decoder(laws(i)) for i in range(3)]
    assert decoders[0].step is decoders[2].step and decoders[2].config.controller == laws(2)
    for i in range(1, 12):
        model.decoder(replace(laws(0), dense_layers=1 + i))
    assert len(model._decoders.compiled) <= 4

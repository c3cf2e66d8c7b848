"""Few sequences in an engine of many slots: the same completions in programs of fewer rows, made once."""

import time

import pytest
from reopened import bits

import et_jax
from et_jax import GenerationRequest, SamplingParams
from et_jax.serve.few_rows import FewRows

pytestmark = pytest.mark.usefixtures("hardly_optimised")


def test_a_completion_has_the_same_bits_in_a_program_of_few_rows(monkeypatch):
    model = et_jax.load("bundled-small", max_num_seqs=8, max_model_len=128, prefix_cache=False)
    sampled = {"temperature": 0.9, "ignore_eos": True}
    asked = [
        GenerationRequest(prompt="It was", params=SamplingParams(seed=i, max_tokens=50 if i == 1 else 20, **sampled))
        for i in range(5)
    ]

    def ran(requests) -> tuple[list, int, int]:
        """The bits of what is generated, the steps that took, and the rows of these."""
        steps, rows = model.metrics.steps, model.metrics.step_rows
        done = [bits(one) for one in model.generate(requests)]
        return done, model.metrics.steps - steps, model.metrics.step_rows - rows

    with monkeypatch.context() as patch:
        patch.setattr(FewRows, "note", lambda *_: None)  # or programs that an earlier run has kept are made at once
        expected, steps, rows = ran(asked)
    assert rows == 8 * steps
    model.decoder().decode.seconds = 0.0  # no longer than the bursts of few sequences took
    model.generate(asked[1])
    [replica] = model.replicas().replicas
    while replica.device.making:
        time.sleep(0.01)
    for number, request in enumerate(asked):
        done, steps, rows = ran([request])
        assert done == expected[number : number + 1] and rows == 2 * steps > 0
    together, steps, rows = ran(asked)
    assert together == expected and 2 * steps < rows < 8 * steps  # the longest ends alone
    assert model.metrics.programs_compiled_late == 0

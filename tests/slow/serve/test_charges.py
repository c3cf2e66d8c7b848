"""What a completion costs: the rows of a step share its weights, idle rows are counted apart and avoided."""

import time

import jax
import pytest
from reopened import bits, reopened, requested

from et_jax.models.weights import num_bytes
from et_jax.serve import engine
from et_jax.serve.programs.few_rows import FewRows

pytestmark = pytest.mark.usefixtures("hardly_optimised")

PROMPT = "It was in the spring of that year"


def test_what_sequences_are_charged_adds_up_to_the_weights_that_steps_read(six_slots):
    """With ends, stop strings in mid-burst and more sequences than rows, swapped between two replicas."""
    served = reopened(six_slots, preempt_every=2, replicas=2)
    kinds = [{}, {"max_tokens": 3}, {"stop": ("e", "a")}, {"temperature": 0.0}, {"n": 2}, {"stop": (" ",)}]
    requests = [requested(PROMPT[i:], **{"max_tokens": 20, "seed": i} | kind) for i, kind in enumerate(kinds)]
    done = served.generate(requests)
    config = six_slots.decoder_config
    width = -(-2 * config.model.head_dim // 128) * 128  # keys and values of a KV head, in lines of 128 values
    block = config.page_size * width * jax.numpy.dtype(config.cache_dtype).itemsize
    own = block * sum(row.blocks_read for one in done for row in one.trace)
    charged = sum(one.cost for one in done) - own + served.metrics.idle_cost
    assert charged == pytest.approx(served.metrics.steps * num_bytes(six_slots.params), rel=1e-12)
    assert served.metrics.cost == pytest.approx(sum(one.cost for one in done))
    idle_rows = 4 * served.metrics.steps - sum(len(one.token_ids) for one in done)
    assert (served.metrics.step_rows, served.metrics.idle_rows) == (4 * served.metrics.steps, idle_rows)
    if six_slots.params.head is None:
        per_row = 2 * (num_bytes(six_slots.params) // six_slots.params.embedding.dtype.itemsize)
        assert served.metrics.idle_flops == idle_rows * per_row


def test_a_completion_has_the_same_bits_in_a_program_of_few_rows(monkeypatch):
    model = engine.load("bundled-small", max_num_seqs=8, max_model_len=128, prefix_cache=False)
    limits = (20, 110, 20, 20, 20)
    asked = [requested("It was", seed=i, max_tokens=limit, temperature=0.9) for i, limit in enumerate(limits)]

    def ran(requests) -> tuple[list, int, int]:
        """The bits of what is generated, the steps that took, and the rows of these."""
        steps, rows = model.metrics.steps, model.metrics.step_rows
        done = [bits(one) for one in model.generate(requests)]
        return done, model.metrics.steps - steps, model.metrics.step_rows - rows

    with monkeypatch.context() as patch:
        patch.setattr(FewRows, "record", lambda *_: None)  # or programs that an earlier run has kept are made at once
        expected, steps, rows = ran(asked)
    assert rows == 8 * steps
    full = model.decoder().variants[model.decoder_config.full_variant]
    full.seconds = 0.0  # type: ignore[attr-defined]  # no longer than the bursts of few sequences took
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

"""Requests are replayed in the order of a rule, as a simulation has it step by step."""

import numpy as np
import pytest

from et_jax.serve.engine import load
from et_jax.serve.requests import GenerationRequest, SamplingParams
from scripts.experiments import scheduling

pytestmark = pytest.mark.usefixtures("hardly_optimised")

LENGTHS, TIMES, BATCH = [9, 4, 12, 3, 6, 5], [0.0, 0.0, 0.1, 0.3, 0.35, 0.9], 2
SCORES = {  # of a request by its number and the tokens that it has
    "fcfs": lambda i, had: -i,
    "srpt": lambda i, had: had - LENGTHS[i],
    "least attained": lambda i, had: -had,
}


@pytest.fixture(scope="module")
def model():
    return load("bundled-small", max_num_seqs=BATCH, max_resident_seqs=len(LENGTHS), max_model_len=32)


@pytest.mark.parametrize("name", SCORES)
def test_requests_are_served_in_the_order_of_the_rule(model, name):
    """Of equal scores that of the lower slot is served; a newcomer gets the first free slot."""
    asked = [
        GenerationRequest(prompt=(1, 50 + i), params=SamplingParams(max_tokens=length, ignore_eos=True, seed=i))
        for i, length in enumerate(LENGTHS)
    ]
    arrived = np.array(TIMES) * sum(LENGTHS) / (BATCH * 1.5)
    found = scheduling.replay(model, scheduling.RULES[name], asked, None, arrived)
    slots: dict[int, int] = {}
    had, first, last = ([0.0] * len(LENGTHS) for _ in range(3))
    now, coming = 0.0, list(range(len(LENGTHS)))
    while coming or slots:
        if not slots and arrived[coming[0]] > now:
            now = arrived[coming[0]]
        while coming and arrived[coming[0]] <= now:
            slots[min(set(range(len(LENGTHS))) - slots.keys())] = coming.pop(0)
        now += 1.0
        ranked = sorted(slots, key=lambda slot: (-SCORES[name](slots[slot], had[slots[slot]]), slot))
        for slot in ranked[:BATCH]:
            i = slots[slot]
            had[i] += 1
            first[i] = first[i] or now
            if had[i] == LENGTHS[i]:
                last[i] = now
                del slots[slot]
    np.testing.assert_allclose(found["latency"], last - arrived)
    np.testing.assert_allclose(found["first_token"], first - arrived)
    assert found["tokens_per_step"] == sum(LENGTHS) / now

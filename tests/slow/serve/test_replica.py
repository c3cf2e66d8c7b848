"""Many requests at once: batching, swaps, cached prefixes and chunk borders change no bit of a completion.

Compiled as users have it; `tests/laws` say the same of every capability, compiled in a hurry.
"""

import functools
import os
from pathlib import Path

import numpy as np
import pytest
from capabilities import Capability
from reopened import SENTENCE, requested
from served import Served, assert_balanced, bits

from et_jax.serve import engine
from et_jax.types import replace

SIZES = {"max_num_seqs": 4, "max_resident_seqs": 6, "max_model_len": 256, "num_pages": 28}
"""Six slots of which four advance, and pages for about a quarter of what they could hold."""
CHUNKS = {"prefill_batch": 32, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def served():
    return Served(Capability(load=functools.partial(engine.load, "bundled-small"), settings=SIZES | CHUNKS))


def test_every_completion_has_the_bits_of_a_batch_of_one(served):
    busy = served.anew(preempt_every=2, replicas=3)
    done = busy.generate(served.requests * 2)  # the second time from cached prefixes
    assert bits(done) == bits(served.alone * 2)
    metrics = busy.metrics
    assert metrics.generated_tokens == sum(len(one.token_ids) for one in done)
    assert metrics.preemptions > 10 and metrics.cached_prompt_tokens > 0 and metrics.programs_compiled_late == 0
    assert_balanced(busy)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_traffic_of_uneven_lengths_leaves_the_memory_of_the_process_flat():
    """All are answered, pages come back, memory stays as at a third."""
    busy = engine.load("bundled-small", max_num_seqs=16, max_model_len=256, num_pages=60, replicas=2, preempt_every=20)
    tokens, count, rng = busy.tokenizer.encode(SENTENCE * 8), 600, np.random.default_rng(0)
    lengths, limits = (np.clip(rng.lognormal(mean, 1.0, count), 1, most) for mean, most in ((3.5, 200), (1.0, 20)))
    arrivals = (
        requested(tuple(tokens[number % 7 :][: int(lengths[number])]), max_tokens=int(limits[number]), seed=number)
        for number in range(count)
    )
    answered, overtaken, bytes_at_a_third = set(), 0, 0
    for index, completion in busy.as_completed(arrivals):
        assert completion.finish_reason == "length" and index not in answered
        overtaken = max(overtaken, len(answered) - index)
        answered.add(index)
        if len(answered) == count // 3:
            bytes_at_a_third = resident_bytes()
    assert len(answered) == count
    assert resident_bytes() < bytes_at_a_third * 1.05
    assert overtaken < count // 3 and busy.metrics.preemptions > 0 and busy.metrics.programs_compiled_late == 0
    assert_balanced(busy)


def test_priorities_and_deadlines_order_requests_and_none_is_forgotten(served):
    """Eighteen requests come first; then six of a higher priority, and one whose deadline has passed."""
    low = [requested(tuple(served.tokens[:20]), max_tokens=8, seed=seed) for seed in range(18)]
    for urgent in ([replace(one, priority=5.0) for one in low[:6]], [replace(low[0], deadline=1e-3)]):
        order = [index for index, _ in served.anew().as_completed([*low, *urgent])]
        assert sorted(order) == list(range(18 + len(urgent)))
        assert set(order[:6]) >= set(range(18, 18 + len(urgent)))

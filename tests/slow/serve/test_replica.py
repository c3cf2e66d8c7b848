"""Many requests at once: batching, swaps, cached prefixes and chunk borders change no bit of a completion.

Compiled as users have it; `tests/laws` say the same of every capability, compiled in a hurry.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from reopened import assert_balanced, bits, reopened

from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams

SENTENCE = "It was in the spring of that year that the old house by the river was let again, and nobody knew to whom. "


@pytest.fixture(scope="module")
def model():
    """Six slots of which four advance, and pages for about a quarter of what they could hold."""
    return engine.load(
        "bundled-small",
        max_num_seqs=4,
        max_resident_seqs=6,
        max_model_len=256,
        num_pages=28,
        prefill_batch=64,
        max_num_batched_tokens=64,
    )


@pytest.fixture(scope="module")
def tokens(model) -> tuple[int, ...]:
    return tuple(model.tokenizer.encode(SENTENCE * 8))


@pytest.fixture(scope="module")
def requests(tokens):
    """Prompts of lengths around page and chunk borders, of three beginnings, and all kinds of settings."""
    lengths = [1, 2, 16, 17, 31, 32, 33, 34, 64, 65, 66, 96, 97, 100, 129]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"top_k": 20, "logprobs": 3},
        {"temperature": 1.3, "min_p": 0.05},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logprobs": 20},
        {"stop": ("the", ". ")},
    ]
    return [
        GenerationRequest(
            prompt=tokens[16 * (number % 3) :][: lengths[-number % 15]],
            params=SamplingParams(max_tokens=1 + 17 * number % 59, seed=number, **kinds[number % 7]),
        )
        for number in range(28)
    ]


@pytest.fixture(scope="module")
def alone(model, requests):
    """The bits of every request in a batch of one, without cached prefixes."""
    quiet = reopened(model, prefix_cache=False)
    return [bits(quiet.generate(request)[0]) for request in requests]


def test_every_completion_has_the_bits_of_a_batch_of_one(model, requests, alone):
    busy = reopened(model, preempt_every=2, replicas=3)
    done = busy.generate(requests)
    assert [bits(one) for one in done] == alone
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
        GenerationRequest(
            prompt=tuple(tokens[number % 7 :][: int(lengths[number])]),
            params=SamplingParams(max_tokens=int(limits[number]), seed=number, ignore_eos=True),
        )
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


def test_priorities_and_deadlines_order_requests_and_none_is_forgotten(model, tokens):
    """Eighteen requests come first; then six of a higher priority, and one whose deadline has passed."""

    def asked(seed: int, **urgency) -> GenerationRequest:
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=seed)
        return GenerationRequest(prompt=tokens[:20], params=params, **urgency)

    low = [asked(i) for i in range(18)]
    for urgent in ([asked(i, priority=5.0) for i in range(6)], [asked(0, deadline=1e-3)]):
        order = [index for index, _ in reopened(model).as_completed([*low, *urgent])]
        assert sorted(order) == list(range(18 + len(urgent)))
        assert set(order[:6]) >= set(range(18, 18 + len(urgent)))

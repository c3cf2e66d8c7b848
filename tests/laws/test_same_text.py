"""A text has the same bits alone, in company, swapped out and in, from kept pages, on any of several replicas.

And with drafts it has those it has without.
"""

import itertools

import pytest
import reopened
from served import assert_balanced, bits

from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.types import replace

WAYS = {
    "company": {"prefix_cache": False},
    "kept pages": {},
    "swapped": {"preempt_every": 2, "prefix_cache": False},
    "replicas": {"preempt_every": 3, "replicas": 2},
}


def test_every_text_has_the_bits_it_has_alone(served):
    alone = bits(served.alone)
    for way, settings in WAYS.items():
        busy = served.anew(**settings)
        kept = settings.get("prefix_cache", True) and served.capability.keeps_prefixes
        for turn in range(1 + kept):  # the second finds the pages of the first
            assert bits(busy.generate(served.requests)) == alone, (way, turn)
        metrics = busy.metrics
        assert (metrics.preemptions > 3) == ("preempt_every" in settings), way
        assert (metrics.cached_prompt_tokens > 0) == kept, way


def test_a_text_has_the_same_bits_from_the_pages_of_a_file(served, tmp_path):
    first, second, file = served.anew(), served.anew(), tmp_path / "prefix"
    if not served.capability.keeps_prefixes:
        with pytest.raises(UsageError, match="Prompts are not cached"):
            first.save_prefix(served.tokens[:50], file)
        return
    num_tokens = first.save_prefix(served.tokens[:50], file)
    assert second.load_prefix(file) == num_tokens >= 32 and second.metrics.prompt_tokens == 0
    assert bits(second.generate(served.requests)) == bits(served.alone)
    assert second.metrics.cached_prompt_tokens > 0
    assert_balanced(second)


def but_for_drafts(done: list[Completion]) -> list:
    """Every bit but what is told of the drafts, and of the experts that they touched."""
    return [reopened.bits(one, flops=0.0, drafted=0, accepted=False, experts=None) for one in done]


@pytest.mark.slow
def test_no_draft_changes_a_bit_however_many_tokens_a_request_allows(served):
    if not served.capability.drafts:
        pytest.skip("this capability does not draft")
    plain = {name: one for name, one in served.capability.settings.items() if not name.startswith("draft")}
    kinds = itertools.cycle(((None, 0.0, None), (0, 1.0, 0.05), (2, -1.0, 60.0)))
    asked = [
        replace(request, draft_tokens=most, priority=priority, deadline=deadline)
        for request, (most, priority, deadline) in zip(served.requests, kinds, strict=False)
    ]
    expected = but_for_drafts(replace(served.capability, settings=plain).opened().generate(asked))
    for way, settings in WAYS.items():
        busy = served.anew(**settings)
        done = busy.generate(asked)
        assert but_for_drafts(done) == expected, way
        limited = [request.draft_tokens for request in asked for _ in range(request.params.n)]
        never = [one for one, limit in zip(done, limited, strict=True) if limit == 0]
        assert never and not any(row.drafted or row.accepted for one in never for row in one.trace)
        assert busy.metrics.accepted_tokens > 0
        assert_balanced(busy)

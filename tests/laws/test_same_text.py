"""A text has the same bits alone, in company, swapped out and in, from kept pages, on any of several replicas."""

from served import bits

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

"""A text has the same bits alone, in company, swapped out and in, from kept pages, on any of several replicas.

And with drafts it has those it has without: of a great many requests of every kind that may be asked for.
"""

import dataclasses
import random

import pytest
import reopened
from capabilities import CAPABILITIES, Capability
from served import Served, assert_balanced, bits

from et_jax.errors import UsageError
from et_jax.serve.completions import Completion
from et_jax.serve.requests import GenerationRequest, SamplingParams

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


SOMETIMES = {
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "eta_cutoff": 0.05,
    "p_less": True,
    "min_k": 3.0,
    "repetition_penalty": 1.3,
    "frequency_penalty": -2.0,
    "presence_penalty": 0.5,
    "stop": ("the", ". "),
    "ignore_eos": True,
    "logprobs": 3,
}


class Many(Served):
    """A row of the table with `many` requests drawn by chance, half of whose prompts begin alike."""

    def __init__(self, capability: Capability, many: int) -> None:
        self.many = many
        super().__init__(capability)

    def _asked(self) -> list[GenerationRequest]:
        drawn = random.Random(0)

        def one(number: int) -> GenerationRequest:
            first, length = drawn.choice((0, 0, 0, 5, 8, 16)), drawn.randint(1, 50)
            some = drawn.sample(sorted(SOMETIMES), drawn.randint(0, 4))
            params: dict = {name: SOMETIMES[name] for name in some}
            params |= {"temperature": drawn.choice((0.0, 0.0, 0.4, 0.8, 1.3)), "n": drawn.choice((1, 1, 1, 2, 3))}
            return GenerationRequest(
                prompt=tuple(self.tokens[first : first + length]),
                params=SamplingParams(max_tokens=drawn.randint(1, 24), seed=number, **params),
                priority=drawn.choice((0.0, 0.0, 1.0, -1.0)),
                deadline=drawn.choice((None, None, 0.05, 60.0)),
                draft_tokens=drawn.choice((None, None, None, 0, 1, 2)),
                adapter=drawn.choice(self.adapters) if len(self.adapters) > 1 else None,
            )

        return [one(number) for number in range(self.many)]


def but_for_drafts(done: list[Completion]) -> list:
    """Every bit but what is told of the drafts."""
    return [reopened.bits(one, flops=0.0, drafted=0, accepted=False) for one in done]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "many"), [("adaptive, self", 16), ("compressed by head", 16)])
def test_requests_of_all_kinds_have_the_bits_that_each_has_alone_without_drafts(name, many):
    capability = CAPABILITIES[name]()
    plain = {setting: one for setting, one in capability.settings.items() if not setting.startswith("draft")}
    expected = but_for_drafts(Many(dataclasses.replace(capability, settings=plain), many).alone)
    drafting = Many(capability, many)
    assert but_for_drafts(drafting.alone) == expected
    asked = [request for request in drafting.requests for _ in range(request.params.n)]
    never = [one for request, one in zip(asked, drafting.alone, strict=True) if request.draft_tokens == 0]
    assert never and not any(row.drafted or row.accepted for one in never for row in one.trace)
    for way, settings in WAYS.items():
        busy = drafting.anew(**settings)
        assert but_for_drafts(busy.generate(drafting.requests)) == expected, way
        assert busy.metrics.accepted_tokens > 2 * many
        assert busy.metrics.preemptions > many // 5 or "preempt_every" not in settings
        assert_balanced(busy)

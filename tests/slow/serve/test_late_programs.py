"""Nothing is compiled after warm-up under a control for one call; a law holds every row of its table to that."""

import jax.numpy as jnp
import pytest
from reopened import SIZES

from et_jax.control.base import Law, chain, claim, noted
from et_jax.control.controller import Controller
from et_jax.serve import engine
from et_jax.serve.requests import GenerationRequest, SamplingParams
from et_jax.types import replace, value

pytestmark = pytest.mark.usefixtures("hardly_optimised")

SENTENCE = "It was in the spring of that year that the old house by the river was let again. "


def everything(tokenizer) -> list[GenerationRequest]:
    """Requests of every kind: deadlines, priorities, several continuations, penalties, alternatives, stops."""
    tokens = tokenizer.encode(SENTENCE * 3)
    kinds = [
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 3, "n": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        {"stop": ("the", "zzz"), "stop_token_ids": (7,)},
        {"seed": 2**63 - 1, "ignore_eos": True},
    ]
    urgencies = [{"deadline": 0.5}, {}, {"priority": 2.0}, {"priority": -1.0, "deadline": 1e6}, {}, {"deadline": 1e-9}]
    return [
        GenerationRequest(
            prompt=SENTENCE if i == 1 else tuple(tokens[: 1 + 13 * i]),
            params=SamplingParams(**{"max_tokens": 6 + 5 * i} | kind),
            **urgency,
        )
        for i, (kind, urgency) in enumerate(zip(kinds, urgencies, strict=True))
    ]


@value
class Own(Law):
    def init(self, state):
        return claim(self, state, "mine", jnp.zeros_like(state.entropy))

    def __call__(self, signals, state):
        return noted(replace(state, temperature=state.temperature * 0.99), "mine", signals.entropy)


def own() -> Controller:
    def rule(moments_at, signals, state):
        return jnp.minimum(state.temperature, 1.5)

    return Controller(
        law=chain(Controller().law, Own()), temperature_rule=rule, priority=lambda signals, state: signals.urgency
    )


def test_a_mixture_of_everything_compiles_nothing_late():
    served, control = engine.load(**SIZES), own()
    served.warm_up(control)
    requests = everything(served.tokenizer)
    done = [completion for _, completion in served.as_completed(requests, control=control)]
    stream = served.stream(requests[2], control=control)
    next(stream)
    stream.close()
    served.generate(requests[0], control=control)
    assert len(done) == 8 and all(one.error is None for one in done)
    assert served.metrics.programs_compiled_late == 0

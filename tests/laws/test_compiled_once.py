"""Nothing is compiled after warm-up, whatever is asked for and however it is served."""

from et_jax.serve.requests import GenerationRequest, SamplingParams


def test_a_mixture_of_everything_compiles_nothing_late(served):
    model = served.anew(preempt_every=2, replicas=2)
    model.warm_up()
    urgent = [
        GenerationRequest(
            prompt=tuple(served.tokens[:21]),
            params=SamplingParams(max_tokens=9, stop_token_ids=(7,), n=3, seed=2**63 - 1),
            **urgency,
        )
        for urgency in ({"deadline": 1e-9}, {"priority": -1.0, "deadline": 1e6}, {"priority": 2.0})
    ]
    done = [completion for _, completion in model.as_completed([*served.requests, *urgent])]
    assert len(done) == sum(one.params.n for one in [*served.requests, *urgent])
    assert all(one.error is None for one in done)
    stream = model.stream(served.requests[1])
    next(stream)
    stream.close()
    if served.capability.dense:
        model.generate(GenerationRequest(prompt="It", params=SamplingParams(), control=dict(served.capability.dense)))
    assert model.metrics.programs_compiled_late == 0

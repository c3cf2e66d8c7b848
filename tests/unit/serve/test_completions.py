"""Completions and what entropy and cost come to over several, by their definitions."""

from plain_sequences import row

from et_jax.serve.completions import Completion, TokenTrace
from et_jax.serve.totals import Totals


def completion(trace: list[TokenTrace]) -> Completion:
    told = {"prompt": "a", "prompt_tokens": 1, "index": 0, "text": "", "finish_reason": "length"}
    return Completion(token_ids=tuple(each.token for each in trace), trace=tuple(trace), **told)


def test_entropic_time_is_that_of_the_last_token_and_rates_are_the_worst():
    early = row(5, entropic_time=1.0, guard_rates={"stability": 0.5})
    late = row(6, entropic_time=3.0, guard_rates={"stability": 0.2})
    one, other = completion([early, late]), completion([early])
    assert (one.entropic_time, one.efficiency) == (3.0, 0.5) and one.guard_rates == {"stability": 0.2}
    summary = Totals.of([one, other]).to_dict()
    assert (summary["entropic_time"], summary["nats_per_byte"]) == (4.0, 4 / 9)
    assert summary["guard_rates"] == {"stability": 0.5}
    said = completion([row(5, surprisal=0.25)]).to_dict()
    assert said["logprobs"] == [-0.25] and said["usage"] == {"prompt_tokens": 1, "completion_tokens": 1}
    bound = [row(5, entropy=3.0, constrained_entropy=0.0), row(5, entropy=1.0, constrained_entropy=1.0), row(5)]
    assert Totals.of([completion(bound)]).to_dict()["mean_constrained_entropy"] == 0.5
    assert "75% of the entropy decided by the grammar" in Totals.of([completion(bound)]).described()
    assert "grammar" not in Totals.of([completion(bound[2:])]).described()
    none = completion([])
    assert (none.entropic_time, none.cost, none.efficiency, none.guard_rates, none.logprobs) == (0.0, 0.0, 0.0, {}, ())

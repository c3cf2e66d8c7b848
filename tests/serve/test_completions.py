"""Completions and what entropy and cost come to over several, by their definitions."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_sequences import row

from et_jax.serve.completions import Completion, TokenTrace, entropic

figures = st.floats(1e-3, 1e6)
rows = st.builds(
    lambda cost, flops, read, mass, temperature: row(
        5, cost=cost, flops=flops, blocks_read=read, blocks_held=8, kept_mass=mass, temperature=temperature
    ),
    figures,
    figures,
    st.integers(0, 8),
    st.floats(0, 1),
    st.floats(0, 3),
)


def completion(trace: list[TokenTrace]) -> Completion:
    return Completion(
        prompt="a",
        prompt_tokens=1,
        index=0,
        text="",
        token_ids=tuple(each.token for each in trace),
        finish_reason="length",
        trace=tuple(trace),
    )


@given(st.lists(st.lists(rows, max_size=5), min_size=1, max_size=4))
def test_sums_are_sums_and_shares_are_over_all_tokens(traces):
    summary, every = entropic([completion(trace) for trace in traces]), [each for trace in traces for each in trace]
    assert summary["cost_bytes"] == pytest.approx(math.fsum(each.cost for each in every))
    assert summary["flops"] == pytest.approx(math.fsum(each.flops for each in every))
    if every:
        shares = [each.blocks_read / 8 for each in every]
        assert summary["mean_share_read"] == pytest.approx(sum(shares) / len(shares))
        assert summary["least_mass_kept"] == min(each.kept_mass for each in every)
        heats = [each.temperature for each in every]
        assert summary["temperature_range"] == [min(heats), max(heats)]
    else:
        assert summary["mean_share_read"] is summary["least_mass_kept"] is summary["temperature_range"] is None


def test_entropic_time_is_that_of_the_last_token_and_rates_are_the_worst():
    early = row(5, entropic_time=1.0, guard_rates={"stability": 0.5})
    late = row(6, entropic_time=3.0, guard_rates={"stability": 0.2})
    one, other = completion([early, late]), completion([early])
    assert (one.entropic_time, one.efficiency) == (3.0, 0.5) and one.guard_rates == {"stability": 0.2}
    summary = entropic([one, other])
    assert (summary["entropic_time"], summary["nats_per_byte"]) == (4.0, 4 / 9)
    assert summary["guard_rates"] == {"stability": 0.5}


def test_an_empty_completion_has_no_figures():
    none = completion([])
    assert (none.entropic_time, none.cost, none.efficiency, none.guard_rates, none.logprobs) == (0.0, 0.0, 0.0, {}, ())


def test_plain_values_are_ready_for_json():
    said = completion([row(5, surprisal=0.25)]).to_dict()
    assert said["logprobs"] == [-0.25] and said["usage"] == {"prompt_tokens": 1, "completion_tokens": 1}

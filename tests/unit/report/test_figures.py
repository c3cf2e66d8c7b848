"""The figures of a report say what the trace holds."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import sample

from et_jax.report.drawing import MOST_POINTS, Figure, binned
from et_jax.report.figures import of_completion
from et_jax.types import replace


def figure(title: str, completion: Any) -> Figure:
    return {one.title: one for one in of_completion(completion)}[title]


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(float("nan"))), min_size=1, max_size=300), st.integers(1, 40))
def test_groups_hold_every_value_once(values: list[float], most: int) -> None:
    given, (place, mean, least, greatest) = np.array(values), binned(np.array(values), most)
    size = -(-len(values) // most)
    groups = [given[start : start + size] for start in range(0, len(values), size)]
    assert len(groups) == len(mean) <= most
    for i, group in enumerate(groups):
        known = group[~np.isnan(group)]
        start = i * size
        assert place[i] == (start + 1 + start + len(group)) / 2
        if len(known) == 0:
            assert np.isnan([mean[i], least[i], greatest[i]]).all()
        else:
            assert mean[i] == pytest.approx(known.mean(), abs=1e-6)
            assert (least[i], greatest[i]) == (known.min(), known.max())


def test_lines_have_a_point_for_every_token_of_a_short_text() -> None:
    completion = sample(50)
    columns = figure("Entropy and surprisal", completion).columns
    assert columns["token"] == list(range(1, 51))
    np.testing.assert_allclose(columns["entropy"], [row.entropy for row in completion.trace], rtol=1e-4)
    np.testing.assert_allclose(columns["surprisal"], [row.surprisal for row in completion.trace], rtol=1e-4)
    warm = figure("Temperature", completion).columns["temperature"]
    np.testing.assert_allclose(warm, [row.temperature for row in completion.trace], rtol=1e-4)


def test_long_texts_are_drawn_by_fewer_points_with_a_band() -> None:
    completion = sample(2 * MOST_POINTS + 1)
    drawn = figure("Entropy and surprisal", completion)
    columns, entropy = drawn.columns, [row.entropy for row in completion.trace]
    assert len(columns["token"]) <= MOST_POINTS
    assert max(columns["greatest"]) == pytest.approx(max(entropy), rel=1e-4)
    assert min(columns["least"]) == pytest.approx(min(entropy), rel=1e-4, abs=1e-9)
    assert "mean of 3 tokens" in drawn.caption


def test_heat_is_the_mean_share_of_each_layer_and_head() -> None:
    completion = sample(40)
    rows = [replace(row, reads=((4, 1), (2, 3)), blocks_held=16) for row in completion.trace[:20]]
    rows += [replace(row, reads=((2, 1), (2, 1)), blocks_held=16) for row in completion.trace[20:]]
    drawn = figure("Blocks read, by layer and KV head", replace(completion, trace=tuple(rows)))
    assert list(zip(drawn.columns["layer"], drawn.columns["KV head"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert drawn.columns["share of blocks read"] == [0.75, 0.25, 0.5, 0.5]


def test_heat_over_time_is_the_mean_of_the_heads() -> None:
    completion = sample(2)
    rows = (
        replace(completion.trace[0], reads=((4, 2),), blocks_held=8),
        replace(completion.trace[1], reads=((1, 1),), blocks_held=8),
    )
    columns = figure("Blocks read, as the text goes on", replace(completion, trace=rows)).columns
    assert (columns["token"], columns["to"]) == ([1, 2], [2, 3])
    assert columns["share of blocks read"] == [0.75, 0.25]


def test_a_run_that_tells_no_reads_has_no_heat() -> None:
    completion = sample(3)
    rows = tuple(replace(row, reads=None) for row in completion.trace)
    assert not [one for one in of_completion(replace(completion, trace=rows)) if one.title.startswith("Blocks read,")]


def test_tokens_of_a_small_model_leave_their_places_empty() -> None:
    rows = list(sample(3).trace)
    rows = [replace(row, reads=((1, 3),), blocks_read=4, blocks_held=8) for row in rows]
    rows[1] = replace(rows[1], reads=None, by_small=True)
    drawn = {one.title: one.columns for one in of_completion(replace(sample(3), trace=tuple(rows)))}
    assert drawn["Blocks read, as the text goes on"]["token"] == [1, 3]
    assert drawn["Blocks read, by layer and KV head"]["share of blocks read"] == [0.25, 0.75]


def test_a_run_that_read_everything_has_no_heat() -> None:
    rows = tuple(replace(row, reads=((4, 4),), blocks_read=8, blocks_held=8) for row in sample(3).trace)
    drawn = of_completion(replace(sample(3), trace=rows))
    assert not [one for one in drawn if one.title.startswith("Blocks read,")]


def test_entropy_of_attention_is_a_share_of_the_most_there_is_and_no_nats() -> None:
    completion = sample(12)
    rows = tuple(replace(row, attention_entropy=0.25) for row in completion.trace)
    words = figure("Blocks read", replace(completion, trace=rows)).words
    assert "Entropy of attention, from 0 to 1: " in words and "nats" not in words


def test_steps_are_counted_by_the_drafts_that_they_accepted() -> None:
    completion = sample(12)
    accepted = [True, True, False, False, True, False, True, True, False, False, True, True]  # 2, 0, 1, 2, 0, then 2
    rows = [replace(row, accepted=held, drafted=0) for row, held in zip(completion.trace, accepted, strict=True)]
    rows[0] = replace(rows[0], drafted=6)
    rows[4] = replace(rows[4], drafted=6)
    drawn = figure("Drafts accepted", replace(completion, trace=tuple(rows)))
    wanted = Counter([2, 0, 1, 2, 0, 2])
    assert drawn.columns["steps"] == [wanted[count] for count in drawn.columns["accepted in a step"]]
    assert "7 of 12 drafted tokens accepted in 6 steps" in drawn.words


def test_turns_of_two_models_cover_every_token_once() -> None:
    completion = sample(100, switched=True)
    columns = figure("Which model spoke", completion).columns
    said = [who for start, end, who in zip(*columns.values(), strict=True) for _ in range(start, end)]
    assert said == ["small model" if row.by_small else "model" for row in completion.trace]
    assert all(one != other for one, other in zip(columns["said by"], columns["said by"][1:], strict=False))


def test_what_did_not_happen_is_not_drawn() -> None:
    plain = sample(5)
    rows = tuple(replace(row, guard_rates={"stability": 0.0}) for row in plain.trace)
    titles = {one.title for one in of_completion(replace(plain, trace=rows))}
    assert not titles & {"Drafts accepted", "Which model spoke", "Guards"}
    assert "Guards" in {one.title for one in of_completion(plain)}


def test_entropic_time_ends_where_the_run_ended() -> None:
    completion = sample(4 * MOST_POINTS - 1)
    columns = figure("Entropic time against cost", completion).columns
    assert columns["entropic time (nats)"][-1] == pytest.approx(completion.entropic_time, rel=1e-4)
    assert columns["cost (MB moved)"][-1] == pytest.approx(completion.cost / 1e6, rel=1e-4)
    assert len(columns["cost (MB moved)"]) <= MOST_POINTS + 1

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
from et_jax.serve.completions import Completion
from et_jax.types import replace

OVER_TIME = ("layer", "token", "share of blocks read")


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


def test_lines_have_a_point_for_every_token_of_a_short_text_and_a_band_over_a_long_one() -> None:
    completion = sample(50)
    names = {"entropy": "Entropy and surprisal", "surprisal": "Entropy and surprisal", "temperature": "Temperature"}
    for name, title in names.items():
        columns = figure(title, completion).columns
        assert columns["token"] == list(range(1, 51))
        np.testing.assert_allclose(columns[name], [getattr(row, name) for row in completion.trace], rtol=1e-4)
    completion = sample(2 * MOST_POINTS + 1)
    drawn = figure("Entropy and surprisal", completion)
    columns, entropy = drawn.columns, [row.entropy for row in completion.trace]
    assert len(columns["token"]) <= MOST_POINTS and "mean of 3 tokens" in drawn.caption
    assert max(columns["greatest"]) == pytest.approx(max(entropy), rel=1e-4)
    assert min(columns["least"]) == pytest.approx(min(entropy), rel=1e-4, abs=1e-9)


def with_rows(*changes: dict[str, Any]) -> Completion:
    """A completion of which each token has figures of its own."""
    done = sample(len(changes))
    return replace(done, trace=tuple(replace(row, **one) for row, one in zip(done.trace, changes, strict=True)))


def test_heat_is_the_mean_share_of_each_layer_and_head_and_over_time_that_of_the_heads() -> None:
    early, late = {"reads": ((4, 1), (2, 3)), "blocks_held": 16}, {"reads": ((2, 1), (2, 1)), "blocks_held": 16}
    drawn = figure("Blocks read, by layer and KV head", with_rows(early, late)).columns
    assert list(zip(drawn["layer"], drawn["KV head"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert drawn["share of blocks read"] == [0.75, 0.25, 0.5, 0.5]
    drawn = figure("Blocks read, as the text goes on", with_rows(early, late)).columns
    at = {(layer, token): share for layer, token, share in zip(*(drawn[name] for name in OVER_TIME), strict=True)}
    assert at == {(0, 1): 0.625, (1, 1): 0.625, (0, 2): 0.375, (1, 2): 0.375}
    assert set(zip(drawn["token"], drawn["to"], strict=True)) == {(1, 2), (2, 3)}
    small = {"reads": None, "by_small": True}  # whose tokens leave their places empty
    own = {"reads": ((1, 3),), "blocks_read": 4, "blocks_held": 8}
    titles = {one.title: one.columns for one in of_completion(with_rows(own, small, own))}
    assert titles["Blocks read, as the text goes on"]["token"] == [1, 3]
    assert titles["Blocks read, by layer and KV head"]["share of blocks read"] == [0.25, 0.75]


def test_steps_are_counted_by_the_drafts_that_they_accepted() -> None:
    accepted = [True, True, False, False, True, False, True, True, False, False, True, True]  # 2, 0, 1, 2, 0, then 2
    rows = [{"accepted": one, "drafted": 6 * (i in (0, 4))} for i, one in enumerate(accepted)]
    drawn = figure("Drafts accepted", with_rows(*rows))
    wanted = Counter([2, 0, 1, 2, 0, 2])
    assert drawn.columns["steps"] == [wanted[count] for count in drawn.columns["accepted in a step"]]
    assert "7 of 12 drafted tokens accepted in 6 steps" in drawn.words

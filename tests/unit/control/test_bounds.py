"""Bounds: every block's mass lies between them, whatever its keys; certificates never promise too much."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_blocks import NUM_BLOCKS, Blocks, blocks, drawn
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import bounds, select

SLACK = 1e-3  # nats: what `certified` grants to rounding
# Scores reach a few tens before rounding to float32 exceeds the slack; models stay far below.
many = settings(max_examples=40, deadline=None)


def codes_of(b):
    """Return 8-bit codes, scale and offset of the keys, rounded to the nearest within each block's box."""
    low, high = np.asarray(b.view.key_min, np.float64), np.asarray(b.view.key_max, np.float64)
    scale = np.where(high > low, (high - low) / 255, 1.0)
    codes = np.rint((b.key - low[:, None]) / scale[:, None]) - 128
    codes = jnp.asarray(np.nan_to_num(codes), jnp.int8)
    return codes, jnp.asarray(scale, jnp.float32), jnp.asarray(low + 128 * scale, jnp.float32)


@jax.jit
def ladder(view, codes, scale, offset):
    """The bounds by box and by chord, which lie within those; and those by 8-bit codes."""
    coded = bounds.coded_mass(view.query, codes, scale, offset, view.num_tokens)
    return [select.box_bounds(view), select.chord_bounds(view)], coded


@many
@given(drawn())
def test_bounds_contain_the_mass_and_each_rung_of_the_ladder_tightens_them(b: Blocks):
    held, rungs = b.held, ladder(b.view, *codes_of(b))
    for interval in (*rungs[0], rungs[1]):
        low, high = np.asarray(interval.low, np.float64), np.asarray(interval.high, np.float64)
        assert np.all(low[:, held] <= b.log_mass[:, held] + SLACK)
        assert np.all(b.log_mass[:, held] <= high[:, held] + SLACK)
        assert np.all(np.isneginf(low[:, ~held]) & np.isneginf(high[:, ~held]))
    for wide, narrow in itertools.pairwise(rungs[0]):
        assert np.all(narrow.high[:, held] <= wide.high[:, held] + SLACK)
        assert np.all(narrow.low[:, held] >= wide.low[:, held] - SLACK)
    single = np.asarray(b.view.num_tokens) == 1  # here the chord's ends meet
    np.testing.assert_allclose(rungs[0][1].high[:, single], b.log_mass[:, single], atol=SLACK)
    np.testing.assert_allclose(rungs[0][1].low[:, single], b.log_mass[:, single], atol=SLACK)
    varied = (np.asarray(b.view.num_tokens) > 1) & np.asarray(b.view.key_max > b.view.key_min).all(-1)
    box, coded = (np.asarray(x.high - x.low, np.float64)[:, varied] for x in (rungs[0][0], rungs[1]))
    np.testing.assert_allclose(coded, box / 255, atol=1e-4, rtol=1e-3)


def test_a_box_contains_the_scores_of_its_corners_and_no_more():
    random = np.random.default_rng(0)
    query, ends = random.normal(size=(2, 4)), np.sort(random.normal(size=(2, 5, 4)), axis=0)
    found = bounds.box(*(jnp.asarray(x, jnp.float32) for x in (query, *ends)))
    corners = np.stack([np.choose(np.asarray(which), ends) for which in itertools.product((0, 1), repeat=4)])
    scores = np.einsum("gd,cnd->cgn", query, corners)
    np.testing.assert_allclose(found.low, scores.min(axis=0), rtol=1e-5)
    np.testing.assert_allclose(found.high, scores.max(axis=0), rtol=1e-5)


def test_the_chord_is_reached_by_keys_at_the_ends_of_the_box():
    """Scores at both ends and nowhere between are the worst case of the chord."""
    score = bounds.Interval(low=jnp.asarray([[-3.0]]), high=jnp.asarray([[2.0]]))
    ends = np.array([-3.0, -3.0, -3.0, 2.0])
    got = bounds.chord_mass(score, jnp.asarray([[ends.mean()]], jnp.float32), jnp.asarray([4]))
    np.testing.assert_allclose(got.high, np.log(np.exp(ends).sum()), rtol=1e-5)
    np.testing.assert_allclose(got.low, np.log(4) + ends.mean(), rtol=1e-5)


@jax.jit
def certified_by(view, low, high):
    return select.Certified(lambda _: bounds.Interval(low=low, high=high))(view)


@many
@given(seed=st.integers(0, 100_000), width=st.floats(0.0, 3.0), tolerance=st.floats(0.01, 0.8))
def test_certified_selection_is_the_highest_cut_that_its_bounds_prove(seed, width, tolerance):
    """The tail is read in any case, and counts at its own mass."""
    b, rng = blocks(seed, spread=1.0), np.random.default_rng(seed)
    given_high = rng.normal(scale=2.0, size=(2, NUM_BLOCKS))
    given_low = given_high - width * rng.uniform(size=given_high.shape)
    low, high = (np.where(b.tail, b.log_mass, x) for x in (given_low, given_high))
    wanted, near = b.tail.copy(), False
    for l_row, u_row in zip(low, high, strict=True):
        for cut in np.sort(u_row)[::-1]:
            closed = (u_row < cut) & ~b.tail
            read, unread = np.exp(l_row[~closed] - SLACK).sum(), np.exp(u_row[closed] + SLACK).sum()
            margin = tolerance * read - (1 - tolerance) * unread
            near |= abs(margin) < 1e-4
            if margin >= 0:
                wanted |= ~closed
                break
    ends = (jnp.asarray(x, jnp.float32) for x in (given_low, given_high))
    opened = certified_by(b.tolerating(tolerance), *ends)
    if not near:  # rounding decides a tie
        np.testing.assert_array_equal(opened, wanted)


@pytest.mark.parametrize("far", [50.0, 90.0, 120.0, 300.0])
def test_a_bound_far_above_all_that_is_proved_proves_nothing(far):
    """float32 represents e^-103 at least: masses over their greatest upper bound would all be 0."""
    view = blocks(0).tolerating(0.1, num_tokens=jnp.full(NUM_BLOCKS, 4, jnp.int32), length=jnp.int32(0))
    low = jnp.zeros((2, NUM_BLOCKS)).at[:, 1].set(5.0)  # block 1 has more mass than all others
    assert np.asarray(certified_by(view, low, low.at[:, 0].set(far)))[1]


@many
@given(seed=st.integers(0, 100_000))
def test_the_bound_on_the_error_of_mean_values_is_its_formula(seed):
    """Guesses lie anywhere between the two bounds of a mass, nearer to either."""
    rng = np.random.default_rng(seed)
    low = rng.normal(size=(2, 6))
    high = low + rng.uniform(0, 3, size=low.shape)
    guess = low + (high - low) * rng.uniform(size=low.shape)
    apart, radius, opened = rng.uniform(size=low.shape), rng.uniform(size=6), rng.uniform(size=6) < 0.4
    log_opened = rng.normal(size=2)
    doubt = np.maximum(np.exp(high) - np.exp(guess), np.exp(guess) - np.exp(low))
    wrong = np.where(opened, 0.0, np.exp(high) * radius + doubt * apart).sum(-1)
    expected = wrong / (np.exp(log_opened) + np.where(opened, 0.0, np.exp(low)).sum(-1))
    numbers = [jnp.asarray(x, jnp.float32) for x in (low, high, guess, log_opened, apart, radius)]
    low, high, guess, log_opened, apart, radius = numbers
    interval = bounds.Interval(low=low, high=high)
    got = bounds.residual_error(interval, guess, jnp.asarray(opened), log_opened, apart, radius)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
def test_a_soft_cap_leaves_the_range_and_the_mean_of_scores_bracketed(soft_cap):
    """Blocks of scores of every size and skew, by the formula in float64; the capped mean is outside the bracket."""
    rng = np.random.default_rng(5)
    size = np.exp(rng.uniform(-2, 4, (200, 1)))
    score = np.asarray(size * (rng.normal(size=(200, 6)) + rng.choice([-2, 0, 2], (200, 1))), np.float32)
    score[::3, 1:] = score[::3, 1:2]  # one stands apart
    low, high, middle = (np.append(x, np.float32(-np.inf))[None] for x in (score.min(1), score.max(1), score.mean(1)))
    interval = bounds.Interval(low=jnp.asarray(low), high=jnp.asarray(high))
    ends, mean = bounds.capped_scores(interval, jnp.asarray(middle), soft_cap)
    assert all(np.isneginf(x[0, -1]) for x in (ends.low, ends.high, mean.low, mean.high))  # of an empty block
    true = soft_cap * np.tanh(score.astype(np.float64) / soft_cap)
    slack = 1e-4
    np.testing.assert_allclose(ends.low[0, :-1], true.min(1), atol=slack)
    np.testing.assert_allclose(ends.high[0, :-1], true.max(1), atol=slack)
    assert (mean.low[0, :-1] <= true.mean(1) + slack).all() and (true.mean(1) <= mean.high[0, :-1] + slack).all()
    naive = soft_cap * np.tanh(score.mean(1) / soft_cap)
    assert (naive > true.mean(1) + slack).any() and (naive < true.mean(1) - slack).any()

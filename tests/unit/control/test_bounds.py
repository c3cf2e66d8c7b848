"""Bounds: every block's mass lies between them, whatever its keys; certificates never promise too much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from et_jax.control import bounds, select

FAMILIES = ("random", "ties", "corners", "needle", "single")  # as the fixture `blocks` draws them
NUM_BLOCKS = 10

SLACK = 1e-3  # nats: what `certified` grants to rounding
# Scores reach a few tens before rounding to float32 exceeds the slack; models stay far below.
many = settings(max_examples=40, deadline=None)
drawn = given(seed=st.integers(0, 100_000), family=st.sampled_from(FAMILIES), spread=st.floats(0.01, 40.0))


def held_of(b):
    return np.asarray(b.view.num_tokens) > 0


def codes_of(b):
    """Return 8-bit codes, scale and offset of the keys, rounded to the nearest within each block's box."""
    low, high = np.asarray(b.view.key_min, np.float64), np.asarray(b.view.key_max, np.float64)
    scale = np.where(high > low, (high - low) / 255, 1.0)
    codes = np.rint((b.key - low[:, None]) / scale[:, None]) - 128
    return (
        jnp.asarray(np.nan_to_num(codes), jnp.int8),
        jnp.asarray(scale, jnp.float32),
        jnp.asarray(low + 128 * scale, jnp.float32),
    )


def ball_bounds(view, radius):
    score = bounds.both(
        bounds.box(view.query, view.key_min, view.key_max), bounds.ball(view.query, view.key_mean, radius)
    )
    return bounds.chord_mass(score, bounds.scores(view.query, view.key_mean), view.num_tokens)


box, chord, ball = jax.jit(select.box_bounds), jax.jit(select.chord_bounds), jax.jit(ball_bounds)
coded = jax.jit(lambda view, codes, scale, offset: bounds.coded_mass(view.query, codes, scale, offset, view.num_tokens))
kept_mass = jax.jit(bounds.certain_share)


def radius_of(b):
    middle = np.asarray(b.view.key_mean, np.float64)[:, None]
    apart = np.linalg.norm(b.key - middle, axis=-1)
    return jnp.asarray(np.max(np.nan_to_num(apart), axis=-1), jnp.float32)


@many
@drawn
def test_every_block_holds_at_least_its_lower_and_at_most_its_upper_bound(blocks, seed, family, spread):
    b = blocks(seed, family, spread)
    held = held_of(b)
    for interval in (box(b.view), chord(b.view), ball(b.view, radius_of(b)), coded(b.view, *codes_of(b))):
        low, high = np.asarray(interval.low, np.float64), np.asarray(interval.high, np.float64)
        assert np.all(low[:, held] <= b.log_mass[:, held] + SLACK)
        assert np.all(b.log_mass[:, held] <= high[:, held] + SLACK)
        assert np.all(np.isneginf(low[:, ~held]) & np.isneginf(high[:, ~held]))


@many
@drawn
def test_the_ladder_only_tightens(blocks, seed, family, spread):
    b = blocks(seed, family, spread)
    held = held_of(b)
    loose, sharp, round_ = box(b.view), chord(b.view), ball(b.view, radius_of(b))
    for wide, narrow in ((loose, sharp), (sharp, round_)):
        assert np.all(narrow.high[:, held] <= wide.high[:, held] + SLACK)
        assert np.all(narrow.low[:, held] >= wide.low[:, held] - SLACK)


@many
@given(seed=st.integers(0, 100_000), spread=st.floats(0.01, 40.0))
def test_the_bounds_of_a_single_token_meet(blocks, seed, spread):
    b = blocks(seed, "single", spread)
    held = held_of(b)
    interval = chord(b.view)
    np.testing.assert_allclose(interval.low[:, held], b.log_mass[:, held], atol=SLACK)
    np.testing.assert_allclose(interval.high[:, held], b.log_mass[:, held], atol=SLACK)


def test_the_chord_is_reached_by_keys_at_the_ends_of_the_box(blocks):
    """Scores at both ends and nowhere between are the worst case of the chord."""
    score = bounds.Interval(low=jnp.asarray([[-3.0]]), high=jnp.asarray([[2.0]]))
    ends = np.array([-3.0, -3.0, -3.0, 2.0])
    got = bounds.chord_mass(score, jnp.asarray([[ends.mean()]], jnp.float32), jnp.asarray([4]))
    np.testing.assert_allclose(got.high, np.log(np.exp(ends).sum()), rtol=1e-5)
    np.testing.assert_allclose(got.low, np.log(4) + ends.mean(), rtol=1e-5)


@many
@drawn
def test_codes_bracket_the_mass_within_a_255th_of_the_box(blocks, seed, family, spread):
    b = blocks(seed, family, spread)
    held = np.asarray(b.view.num_tokens) > 1
    width = np.asarray(box(b.view).high - box(b.view).low, np.float64)[:, held]
    got = coded(b.view, *codes_of(b))
    varied = np.asarray(b.view.key_max > b.view.key_min).all(-1)[held]
    np.testing.assert_allclose((got.high - got.low)[:, held][:, varied], width[:, varied] / 255, atol=1e-4, rtol=1e-3)


@many
@drawn
def test_a_certificate_never_exceeds_the_mass_truly_read(blocks, seed, family, spread):
    b = blocks(seed, family, spread)
    opened = np.random.default_rng(seed).uniform(size=NUM_BLOCKS) < 0.5
    opened[0] = True
    log_opened = jnp.asarray(np.log(np.exp(b.log_mass[:, opened]).sum(-1)), jnp.float32)
    truth = 1 - b.unread(opened)
    for interval in (box(b.view), chord(b.view), coded(b.view, *codes_of(b))):
        got = kept_mass(interval.high + SLACK, jnp.asarray(opened), log_opened)
        assert np.all(got <= truth + 1e-6)
        whole = kept_mass(interval.high, jnp.ones(NUM_BLOCKS, bool), log_opened)
        np.testing.assert_array_equal(whole, 1.0)


@many
@given(
    seed=st.integers(0, 100_000),
    family=st.sampled_from(FAMILIES),
    spread=st.floats(0.01, 40.0),
    tolerance=st.floats(1e-4, 0.9),
    guarded=st.booleans(),
)
def test_certified_selection_leaves_no_more_than_the_tolerance(blocks, seed, family, spread, tolerance, guarded):
    b = blocks(seed, family, spread, tolerance)
    codes = codes_of(b)
    for bound in ("box", "chord", "codes"):
        opened = CERTIFIED[bound, guarded](b.view, codes)
        assert np.all(b.unread(opened) <= tolerance)


def certified(bound, guarded):
    def mask(view, coding):
        codes, scale, offset = coding
        mass_bounds = {
            "box": select.box_bounds,
            "chord": select.chord_bounds,
            "codes": lambda view: bounds.coded_mass(view.query, codes, scale, offset, view.num_tokens),
        }[bound]
        selector = select.Certified(mass_bounds)
        return (select.Guarded(selector) if guarded else selector)(view)

    return jax.jit(mask)


CERTIFIED = {(bound, guarded): certified(bound, guarded) for bound in ("box", "chord", "codes") for guarded in (0, 1)}


@many
@given(seed=st.integers(0, 100_000), spread=st.floats(0.5, 10.0), closed=st.integers(1, NUM_BLOCKS - 1))
def test_a_tolerance_just_missed_is_kept(blocks, seed, spread, closed):
    """The tolerance falls 5% short of what the lightest blocks hold, and their mass is known: not all are closed."""
    b = blocks(seed, "single", spread)
    share = np.sort(np.exp(b.log_mass[0, held_of(b)]) / np.exp(b.log_mass[0]).sum())
    tolerance = 0.95 * share[: min(closed, len(share) - 1)].sum()
    view = b.of_first_query(tolerance)
    for bound in ("box", "chord"):
        opened = CERTIFIED[bound, 0](view, codes_of(b))
        assert np.all(b.unread(opened)[0] <= tolerance)


@jax.jit
def certified_by(view, low, high):
    return select.Certified(lambda _: bounds.Interval(low=low, high=high))(view)


@many
@given(seed=st.integers(0, 100_000), width=st.floats(0.0, 3.0), tolerance=st.floats(0.01, 0.8))
def test_certified_selection_is_the_highest_cut_that_its_bounds_prove(blocks, seed, width, tolerance):
    rng = np.random.default_rng(seed)
    high = rng.normal(scale=2.0, size=(2, NUM_BLOCKS))
    low = high - width * rng.uniform(size=high.shape)
    wanted, near = np.zeros(NUM_BLOCKS, bool), False
    for l_row, u_row in zip(low, high, strict=True):
        for cut in np.sort(u_row)[::-1]:
            closed = u_row < cut
            margin = (
                tolerance * np.exp(l_row[~closed] - SLACK).sum() - (1 - tolerance) * np.exp(u_row[closed] + SLACK).sum()
            )
            near |= abs(margin) < 1e-4
            if margin >= 0:
                wanted |= ~closed
                break
    view = blocks(0).tolerating(tolerance, length=jnp.int32(0))  # no tail: all masses are those given
    opened = certified_by(view, jnp.asarray(low, jnp.float32), jnp.asarray(high, jnp.float32))
    if not near:  # rounding decides a tie
        np.testing.assert_array_equal(opened, wanted)


@pytest.mark.parametrize("bound", ["box", "chord", "codes"])
def test_certified_selection_opens_no_more_than_it_must(blocks, bound):
    """Blocks of equal keys have bounds that meet, so the fewest that hold the mass are opened, ties together."""
    b = blocks(5, "ties", 3.0)
    held = held_of(b)
    rows = b.log_mass - np.log(np.exp(b.log_mass).sum(-1, keepdims=True))
    for tolerance in (0.02, 0.3, 0.6):
        view = b.tolerating(tolerance)
        opened = np.asarray(CERTIFIED[bound, 0](view, codes_of(b)))
        wanted = b.tail()
        for row in np.exp(rows):
            for cut in np.unique(row[held])[::-1]:
                if row[(row < cut * (1 - 1e-5)) & ~b.tail()].sum() <= tolerance:
                    wanted |= row >= cut * (1 - 1e-5)
                    break
        np.testing.assert_array_equal(opened & held, wanted & held)


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
    got = bounds.residual_error(
        bounds.Interval(low=low, high=high), guess, jnp.asarray(opened), log_opened, apart, radius
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize("soft_cap", [0.5, 3.0, 50.0])
def test_a_soft_cap_leaves_the_range_and_the_mean_of_scores_bracketed(soft_cap):
    """Blocks of scores of every size and skew, by the formula in float64; the capped mean is outside the bracket."""
    rng = np.random.default_rng(5)
    size = np.exp(rng.uniform(-2, 4, (200, 1)))
    score = np.asarray(size * (rng.normal(size=(200, 6)) + rng.choice([-2, 0, 2], (200, 1))), np.float32)
    score[::3, 1:] = score[::3, 1:2]  # one stands apart
    ends, mean = bounds.capped_scores(
        bounds.Interval(low=jnp.asarray(score.min(1)[None]), high=jnp.asarray(score.max(1)[None])),
        jnp.asarray(score.mean(1)[None]),
        soft_cap,
    )
    true = soft_cap * np.tanh(score.astype(np.float64) / soft_cap)
    slack = 1e-4
    np.testing.assert_allclose(ends.low[0], true.min(1), atol=slack)
    np.testing.assert_allclose(ends.high[0], true.max(1), atol=slack)
    assert (mean.low[0] <= true.mean(1) + slack).all() and (true.mean(1) <= mean.high[0] + slack).all()
    naive = soft_cap * np.tanh(score.mean(1) / soft_cap)
    assert (naive > true.mean(1) + slack).any() and (naive < true.mean(1) - slack).any()


def test_a_block_that_holds_nothing_has_no_capped_scores():
    nothing = jnp.full((1, 2), -jnp.inf)
    ends, mean = bounds.capped_scores(bounds.Interval(low=nothing, high=nothing), nothing, 3.0)
    assert all(np.isneginf(x).all() for x in (ends.low, ends.high, mean.low, mean.high))

"""Selectors: each opens the blocks its definition names, found by slower programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from et_jax.control import bounds, contribution, select
from et_jax.control.selector import as_selector
from et_jax.control.view import last_mass, mass
from et_jax.types import Count, replace, value

FAMILIES = ("random", "ties", "corners", "needle", "single")  # as the fixture `blocks` draws them
NUM_BLOCKS = 10

many = settings(max_examples=40, deadline=None)
drawn = given(
    seed=st.integers(0, 100_000),
    family=st.sampled_from(FAMILIES),
    spread=st.floats(0.01, 30.0),
    tolerance=st.floats(1e-3, 0.8),
)
PROPORTIONAL = {
    "top_mass": select.TopMass(),
    "certified": select.Certified(),
    "certified box": select.Certified(select.box_bounds),
    "paper influence": select.ActiveSet(alpha=mass),
    "paper mass": select.ActiveSet(contribution.mass, mass),
    "paper value_gauss": select.ActiveSet(contribution.value_gauss, mass),
}
compiled = {name: jax.jit(selector) for name, selector in PROPORTIONAL.items()}


def held_of(b):
    return np.asarray(b.view.num_tokens) > 0


def centroid_shares(b):
    """Return each block's share of mass were its keys all their mean, in float64, but for the tail; 0 if not held."""
    n = np.asarray(b.view.num_tokens, np.float64)
    score = np.asarray(b.view.query, np.float64) @ np.asarray(b.view.key_mean, np.float64).T
    weight = np.where(n > 0, n * np.exp(score), 0.0)
    weight[:, b.tail()] = np.exp(b.log_mass[:, b.tail()])
    return weight / weight.sum(-1, keepdims=True)


def box_shares(b):
    """The same with one more key, half way from the mean to the greatest score that the box of the keys allows."""
    q, low, high, mean = (
        np.asarray(getattr(b.view, name), np.float64) for name in ("query", "key_min", "key_max", "key_mean")
    )
    n, middle = np.asarray(b.view.num_tokens, np.float64), q @ mean.T
    greatest = np.maximum(q[:, None] * low, q[:, None] * high).sum(-1)
    weight = np.where(n > 0, n * np.exp(middle) + np.exp(0.5 * (middle + greatest)), 0.0)
    weight[:, b.tail()] = np.exp(b.log_mass[:, b.tail()])
    return weight / weight.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", PROPORTIONAL)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 100_000), family=st.sampled_from(FAMILIES), spread=st.floats(0.01, 200.0))
@example(seed=0, family="random", spread=5000.0)  # some masses are 0 in float32
def test_tolerance_zero_opens_everything(blocks, name, seed, family, spread):
    b = blocks(seed, family, spread, tolerance=0.0)
    assert np.all(compiled[name](b.view)[held_of(b)])


@many
@drawn
def test_top_mass_opens_the_fewest_blocks_that_hold_enough(blocks, seed, family, spread, tolerance):
    b = blocks(seed, family, spread, tolerance)
    one = b.of_first_query()
    share = centroid_shares(b)[0]
    opened = np.asarray(compiled["top_mass"](one))
    assert share[~opened].sum() <= tolerance + 1e-5
    chosen = opened & ~b.tail()
    least = share[chosen].min(initial=np.inf)
    tied = chosen & (share <= least * (1 + 1e-5))
    assert share[~opened].sum() + share[tied].sum() > tolerance - 1e-5 or not chosen.any() or np.all(tied == chosen)
    both = np.asarray(compiled["top_mass"](b.view))
    assert np.all(both >= opened)
    assert np.all(centroid_shares(b)[:, ~both].sum(-1) <= tolerance + 1e-5)


@many
@drawn
def test_paper_opens_what_contributes_more_than_the_threshold(blocks, seed, family, spread, tolerance):
    b = blocks(seed, family, spread, tolerance)
    share, held = centroid_shares(b), held_of(b)
    value = np.where(held[:, None], np.asarray(b.view.value_mean, np.float64), 0.0)
    n = np.asarray(b.view.num_tokens, np.float64)[:, None] / int(b.view.num_tokens.sum())
    middle = (n * value).sum(0)
    variance = (n * (value - middle) ** 2).sum(0)
    gauss = 0.5 * ((value - middle) ** 2 / np.maximum(variance, 1e-37)).sum(-1)
    # A block held alone has no others to stand out from.
    expected = {"paper mass": share, "paper value_gauss": share * (gauss if held.sum() > 1 else 0.0)}
    for name, each in expected.items():
        sure = np.abs(each - tolerance) > 1e-4 * (1 + tolerance)
        wanted = (each > tolerance).any(0)
        plain = sure.all(0) & held
        np.testing.assert_array_equal(np.asarray(compiled[name](b.view))[plain], wanted[plain])


@many
@given(seed=st.integers(0, 100_000), spread=st.floats(0.01, 6.0))
def test_influence_of_single_tokens_is_how_far_the_output_moves_without_them(blocks, seed, spread):
    """With one token a block the summaries say everything, so the estimate is the exact leave-one-out change."""
    b = blocks(seed, "single", spread)
    held = held_of(b)
    key, value = b.key[held, 0].astype(np.float64), b.value[held, 0].astype(np.float64)
    weight = np.exp(np.asarray(b.view.query, np.float64) @ key.T)
    out = weight @ value / weight.sum(-1, keepdims=True)
    got = np.asarray(contribution.influence(b.view, mass(b.view)))
    assert np.all(got[:, ~held] == 0)
    for block in range(held.sum()):
        rest = weight.copy()
        rest[:, block] = 0
        if held.sum() == 1:
            assert np.all(np.isinf(got[:, block]))
        else:
            without = rest @ value / rest.sum(-1, keepdims=True)
            moved = np.linalg.norm(out - without, axis=-1)
            np.testing.assert_allclose(got[:, block], moved, rtol=2e-3, atol=1e-4)


def test_a_block_that_holds_all_the_mass_is_read(blocks):
    b = blocks(3, "single", 4.0, tolerance=0.5)
    alone = replace(b.view, num_tokens=b.view.num_tokens.at[1:].set(0))
    assert np.asarray(compiled["paper influence"](alone))[0]


@many
@given(seed=st.integers(0, 100_000), family=st.sampled_from(FAMILIES), num_blocks=st.sampled_from([1, 3, 10, 20]))
def test_quest_opens_the_highest_possible_scores(blocks, seed, family, num_blocks):
    b = blocks(seed, family)
    q, low, high = (np.asarray(x, np.float64) for x in (b.view.query, b.view.key_min, b.view.key_max))
    score = np.maximum(q[:, None] * low, q[:, None] * high).sum(-1).max(0)
    held = held_of(b)
    opened = np.asarray(QUEST[num_blocks](b.view))
    assert not np.any(opened & ~held)
    assert opened.sum() >= min(num_blocks, held.sum())
    if family != "ties":
        assert opened.sum() == min(num_blocks, held.sum())
    closed = held & ~opened
    if closed.any():
        assert score[opened].min() > score[closed].max() - 1e-4


QUEST = {n: jax.jit(select.Quest(n)) for n in (1, 3, 10, 20)}


def nothing(view):
    return jnp.zeros(view.start.shape, bool)


@many
@given(
    seed=st.integers(0, 100_000),
    sinks=st.sampled_from([0, 6]),
    window=st.sampled_from([0, 7]),
    min_blocks=st.sampled_from([0, 4]),
)
def test_guards_open_sinks_window_and_a_minimum_and_nothing_else(blocks, seed, sinks, window, min_blocks):
    b = blocks(seed)
    length, held = int(b.view.length), held_of(b)
    wanted = np.zeros(NUM_BLOCKS, bool)
    for position in range(length):
        if position < sinks or position >= length - window:
            wanted[position // 4] = True
    opened = np.asarray(GUARDED[sinks, window, min_blocks](b.view))
    assert np.all(opened >= wanted)
    assert not np.any(opened & ~held)
    assert opened.sum() == max(wanted.sum(), min(min_blocks, held.sum()))
    extra = opened & ~wanted
    likely = centroid_shares(b).max(0)
    if extra.any() and (held & ~opened).any():
        assert likely[extra].min() >= likely[held & ~opened].max() * (1 - 1e-5)


GUARDED = {
    (sinks, window, least): jax.jit(select.Guarded(nothing, sinks, window, least))
    for sinks in (0, 6)
    for window in (0, 7)
    for least in (0, 4)
}


def test_guards_only_add(blocks):
    b = blocks(11, tolerance=0.4)
    guarded = jax.jit(select.Guarded(PROPORTIONAL["certified"]))
    assert np.all(np.asarray(guarded(b.view)) >= np.asarray(compiled["certified"](b.view)) & held_of(b))


def test_dense_reads_all_guarded_or_not(blocks):
    assert select.Guarded(select.Dense()).reads_all
    assert np.all(select.Dense()(blocks(0).view))
    assert not select.Guarded(select.Quest(2)).reads_all


def test_token_nll_weighs_what_is_stored_by_the_mass(blocks):
    b = blocks(7)
    stored = np.linspace(0.5, 5, NUM_BLOCKS)
    got = contribution.token_nll(replace(b.view, mean_surprisal=jnp.asarray(stored, jnp.float32)), mass(b.view))
    np.testing.assert_allclose(got, centroid_shares(b) * stored, rtol=1e-4, atol=1e-6)


def test_a_slot_that_holds_nothing_harms_nobody(blocks):
    """Inactive rows run through the same program: whatever they choose, it is finite work and no error."""
    b = blocks(2)
    empty = replace(b.view, num_tokens=jnp.zeros_like(b.view.num_tokens), length=jnp.int32(0))
    for name, mask in compiled.items():
        assert mask(empty).shape == (NUM_BLOCKS,), name


@pytest.mark.parametrize("far", [50.0, 90.0, 120.0, 300.0])
def test_a_bound_far_above_all_that_is_proved_proves_nothing(blocks, far):
    """float32 holds e^-103 at least: masses told apart by their greatest upper bound would all be 0."""
    view = blocks(0).tolerating(0.1, num_tokens=jnp.full(NUM_BLOCKS, 4, jnp.int32), length=jnp.int32(0))
    low = jnp.zeros((2, NUM_BLOCKS)).at[:, 1].set(5.0)
    given = bounds.Interval(low=low, high=low.at[:, 0].set(far))  # block 1 holds more than all others
    assert np.asarray(select.Certified(lambda _: given)(view))[1]


@value
class _Before:
    end: Count

    def __call__(self, view):
        return view.start < self.end


def test_the_numbers_of_a_mask_are_leaves():
    one, other = (as_selector(_Before(end)) for end in (4, 8))
    assert jax.tree.leaves(one) == [4] and one != other
    assert jax.tree.structure(one) == jax.tree.structure(other)


def lasting(view, share, length=None):
    """The view of a sequence whose blocks had these shares of mass when they were last read."""
    view = replace(view, last_mass=jnp.asarray(share, jnp.float32))
    return view if length is None else replace(view, length=jnp.asarray(length, jnp.int32))


@many
@given(seed=st.integers(0, 100_000), theta=st.floats(1e-3, 0.8))
def test_a_block_is_read_by_the_mass_that_it_or_the_one_before_it_had(blocks, seed, theta):
    b = blocks(seed, tolerance=theta)
    share = np.random.default_rng(seed).dirichlet(np.full(NUM_BLOCKS, 0.3), b.view.query.shape[0])
    chosen = LASTING(lasting(b.view, share))
    moved = np.maximum(share, np.concatenate([np.zeros_like(share[:, :1]), share[:, :-1]], axis=1))
    sure = (np.abs(moved - theta) > 1e-6).all(axis=0)
    np.testing.assert_array_equal(np.asarray(chosen.opened)[sure], ((moved > theta).any(axis=0) & held_of(b))[sure])
    np.testing.assert_allclose(np.exp(np.asarray(chosen.estimate)), share, rtol=1e-5, atol=1e-30)
    assert chosen.shares
    either = np.maximum(moved, box_shares(b))
    sure = (np.abs(either - theta) > 1e-4).all(axis=0)
    opened = np.asarray(GREATER(lasting(b.view, share)).opened)
    np.testing.assert_array_equal(opened[sure], ((either > theta).any(axis=0) & held_of(b))[sure])


def test_what_was_never_read_is_read_and_every_so_many_tokens_all_is(blocks):
    view = blocks(5, tolerance=0.9).view
    everything = np.asarray(view.num_tokens) > 0
    never = np.ones((view.query.shape[0], NUM_BLOCKS))
    np.testing.assert_array_equal(np.asarray(LASTING(lasting(view, never)).opened)[everything], True)
    for length, looks in ((7, False), (8, True), (9, False), (16, True)):
        opened = np.asarray(LOOKING(lasting(view, 0.01 * never, length)).opened)
        assert opened[everything].all() if looks else not opened.any()


def test_a_minimum_is_filled_by_the_last_masses_where_a_selector_goes_by_them(blocks):
    view = blocks(11, tolerance=0.9).view
    held = int((np.asarray(view.num_tokens) > 0).sum())
    share = np.full((view.query.shape[0], NUM_BLOCKS), 1e-3)
    share[0, held // 2] = 0.5
    guarded = select.Guarded(select.ActiveSet(contribution.mass, last_mass), sinks=0, window=0, min_blocks=1)
    np.testing.assert_array_equal(np.flatnonzero(guarded(lasting(view, share))), [held // 2])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"look_every": 0}, "look_every is 0; it must be at least 1, or None"),
        ({"look_every": -1}, "look_every is -1"),
        ({"alpha": lambda view, share: share}, "alpha must be a function of a view"),
        (
            {"contribution": lambda view: view.middle},
            "must be a function of a view and the share of mass in each block",
        ),
    ],
)
def test_what_an_active_set_cannot_use_is_told(given, told):
    with pytest.raises(ValueError, match=told):
        select.ActiveSet(**given)


LASTING = jax.jit(select.ActiveSet(contribution.mass, last_mass).choose)
GREATER = jax.jit(select.ActiveSet(contribution.mass).choose)
LOOKING = jax.jit(select.ActiveSet(contribution.mass, last_mass, look_every=8).choose)
